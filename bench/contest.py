"""Ours and torch's ways to attend, timed by turns on the same tensors."""

import statistics
import sys
import time

import table
import torch
import ways

# Seconds of runs that do not count. A training step finds memory that the step before has given back; fresh memory is
# slow, and on virtual machines for the first dozens of times. A single run that takes longer counts.
WARM = 1.0
# Short runs go on until they have taken so many seconds in all: more of them for the median.
SPAN = 2.0
# Only the best peer counts: one that takes so many times as long as another is not run again.
DISTANT = 1.25
# Of the norm of `out`. Roundings stay far below; one key too many or too few in a window of 1024 is 0.04.
AGREE = {"fp32": 1e-3, "bf16": 1e-2}


def status(text):
    """What is going on, for people who watch; the next line overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}\r", end="", file=sys.stderr, flush=True)


class Runs:
    """The seconds of one way in one pass, and its last result."""

    def __init__(self, name, run, repeat):
        self.name, self.run, self.repeat = name, run, repeat
        self.seconds = []
        self.result = None

    def go(self):
        # Freed here, not after the last run: what nobody takes for some seconds, a virtual machine takes back, and the
        # run waits for fresh memory.
        self.result = None
        begin = time.perf_counter()
        self.result = self.run()
        self.seconds.append(time.perf_counter() - begin)

    def warmed(self):
        self.first = self.seconds[0]
        if self.first < WARM:
            self.seconds.clear()

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def wants_more(self):
        return len(self.seconds) < self.repeat or (self.repeat > 1 and sum(self.seconds) < SPAN)


class Contest:
    """One problem with its tensors. Runs of the forward pass are kept: their results go into the backward one."""

    def __init__(self, problem, rows):
        self.problem, self.rows = problem, rows
        generator = torch.Generator().manual_seed(0)

        def tensor(heads):
            return torch.randn(1, heads, rows, problem.dim, generator=generator).to(ways.TYPES[problem.dtype])

        self.inputs = [tensor(heads).requires_grad_() for heads in ways.three(problem)]
        self.grad_out = tensor(problem.heads[0])
        self.forward = {}
        self.made = {}

    def measure(self, direction, repeat, peers, peak):
        """Runs of ours, and those of every peer that can take part. `peak` is in GFLOP/s."""
        label = table.Case(self.problem, direction).name
        runners = [self.warmed(ways.ours, ways.OURS, direction, repeat)]
        for peer in peers:
            status(f"{label}: preparing {peer}")
            hopeless = peer == "mask" and self.mask_is_hopeless(direction, runners, peak)
            runner = None if hopeless else self.warmed_peer(peer, direction, repeat)
            runners += [runner] if runner else []
        while active := [r for r in runners if r.wants_more and not self.is_distant(r, runners[1:])]:
            for runner in active:
                status(f"{label}: {runner.name}, run {len(runner.seconds) + 1}")
                runner.go()
        return runners[0], runners[1:]

    @staticmethod
    def is_distant(runner, peers):
        times = [peer.median for peer in peers if peer.seconds]
        return runner in peers and bool(runner.seconds) and runner.median > DISTANT * min(times)

    def mask_is_hopeless(self, direction, runners, peak):
        """SDPA with a mask computes all rows by all rows: slower than another way even if it did so at the peak."""
        p = self.problem
        at_peak = table.FLOPS[direction] * p.heads[0] * p.dim * self.rows**2 / (peak * 1e9)
        return any(at_peak > runner.first for runner in runners[1:])

    def warmed_peer(self, peer, direction, repeat):
        try:
            return self.warmed(ways.PEERS[peer], peer, direction, repeat)
        except RuntimeError as error:  # such as a compiler that is missing, or memory
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            name = table.Case(self.problem, direction).name
            print(f"[bench] {peer} is left out of {name}, since it failed: {reason}", file=sys.stderr)
        return None

    def warmed(self, make, key, direction, repeat):
        if key not in self.made:
            self.made[key] = make(self.problem, self.rows)
        way = self.made[key]
        if way is None or (direction == "backward" and not way.has_backward):
            return None
        runs = Runs(way.name, self.run(way, direction), repeat)
        runs.go()
        while sum(runs.seconds) < WARM:
            runs.go()
        runs.warmed()
        if direction == "forward":
            self.keep(runs)
        return runs

    def run(self, way, direction):
        if direction == "forward":
            return lambda: way.attend(*self.inputs)
        if way.name not in self.forward:
            runs = Runs(way.name, self.run(way, "forward"), 1)
            runs.go()
            self.keep(runs)
        out = self.forward[way.name].result
        return lambda: torch.autograd.grad(out, self.inputs, self.grad_out, retain_graph=True)

    def keep(self, runs):
        self.forward[runs.name] = runs
        self.check_agreement(runs)

    @torch.no_grad()
    def check_agreement(self, runs):
        if runs.name == ways.OURS:
            return
        ours = self.forward[ways.OURS].result
        error = ((runs.result - ours).norm() / ours.norm()).item()
        limit = AGREE[self.problem.dtype]
        if not error <= limit:
            raise ValueError(
                f"[bench] all ways must compute the same, but out of {runs.name} and ours differ by {error:.2g} of its "
                f"norm ({table.Case(self.problem, 'forward').name}, at most {limit:g}). One of them is wrong."
            )
