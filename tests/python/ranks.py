"""Ranks as processes, for tests: one gloo group a world size, started once and reused by every test.

A function that runs on ranks is a module-level one, called as ``fn(rank, world, *args)``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait

LIMIT_SECONDS = 60
GROUP_TIMEOUT_SECONDS = 20


@dataclass
class Outcome:
    """What one rank's call came to: a value, or an error; ``kind`` is "died" for a process that ended."""

    value: object = None
    kind: str = ""
    message: str = ""
    where: str = ""


class Group:
    """Processes of one world, waiting for calls."""

    def __init__(self, world: int):
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "blockcp"])
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, fn, args) -> list[Outcome]:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(outcomes) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in outcomes]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                missing = sorted(set(range(len(self.pipes))) - set(outcomes))
                raise AssertionError(f"ranks {missing} did not finish within {LIMIT_SECONDS} s; others: {outcomes}")
            for pipe in ready:
                try:
                    outcome = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcome = Outcome(kind="died")
                outcomes[self.pipes.index(pipe)] = outcome
        return [outcomes[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, world: int, store: str, pipe) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            fn, args = pickle.loads(request)
            outcome = Outcome(value=fn(rank, world, *args))
        except BaseException as error:
            outcome = Outcome(kind=type(error).__name__, message=str(error), where=traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))


_groups: dict[int, Group] = {}


def close_all() -> None:
    for group in _groups.values():
        group.close()
    _groups.clear()


atexit.register(close_all)


def outcomes(world: int, fn, *args, fresh: bool = False) -> list[Outcome]:
    """One outcome a rank. ``fresh``: in processes and a group of their own."""
    if fresh:
        group = Group(world)
        try:
            return group.call(fn, args)
        finally:
            group.close()
    if world not in _groups:
        _groups[world] = Group(world)
    try:
        return _groups[world].call(fn, args)
    except AssertionError:
        del _groups[world]
        raise


def run_ranks(world: int, fn, *args, fresh: bool = False) -> list:
    """The ranks' values; an AssertionError with every rank's traceback if one raises."""
    results = outcomes(world, fn, *args, fresh=fresh)
    if any(result.kind for result in results):
        if not fresh:
            _groups.pop(world).close()  # who knows what its ranks still wait for
        raise AssertionError("\n".join(f"rank {r}: {o.kind}\n{o.where}" for r, o in enumerate(results)))
    return [result.value for result in results]


def same_error(world: int, fn, *args, kind: str = "ValueError") -> str:
    """Every rank must raise the very same error; its text. The group must still complete an ordinary call after it."""
    results = outcomes(world, fn, *args)
    seen = {(result.kind, result.message) for result in results}
    assert len(seen) == 1 and results[0].kind == kind, "\n".join(f"rank {r}: {o}" for r, o in enumerate(results))
    run_ranks(world, ordinary_call)
    return results[0].message


def ordinary_call(rank: int, world: int) -> None:
    import torch

    import blockcp

    plan = blockcp.plan(lengths=[2 * world + 1], rows=4 * world, world_size=world, rank=rank)
    q = torch.zeros(1, 2, 4, 4)
    v = torch.arange(4.0 * rank, 4.0 * rank + 4).reshape(1, 1, 4, 1).expand(1, 1, 4, 4)
    out = blockcp.attention(q, torch.zeros(1, 1, 4, 4), v, plan)
    rows = torch.arange(4 * rank, 4 * rank + 4)
    expected = torch.where(rows < 2 * world + 1, rows / 2, 0.0)
    torch.testing.assert_close(out[0, 0, :, 0], expected)
