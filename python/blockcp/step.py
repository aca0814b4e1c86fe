"""The plan of the training step under way, for code that calls attention without knowing of plans."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F

from blockcp._library import ops
from blockcp.groups import group_name
from blockcp.plan import Plan

_lock = threading.Lock()
_active: list[Step] = []  # over all threads, in the order they were opened
_replaced: list[Any] = []  # what F.scaled_dot_product_attention was before the first open step
_thread = threading.local()


class Step:
    """While open, ``torch.nn.functional.scaled_dot_product_attention`` is :func:`blockcp.sdpa`, in every thread.

    ::

        with blockcp.step(plan, group):
            loss = model(**shard).loss
            loss.backward()

    Steps nest. Other threads (autograd's, a data loader's) find the step that is open where only one is. Leaving a step
    in which no attention call took the context-parallel path is a RuntimeError: the model then attends locally, which
    is silently wrong.

    Keep the backward inside the step where activations are checkpointed: a recomputation after it finds no step and
    calls torch's own attention.

    Args:
        plan: of this batch and rank.
        group: as for :func:`blockcp.attention`.
        mask: the name of the mask that replaced calls use; may be left out where the plan has one.
    """

    def __init__(self, plan: Plan, group: Any = None, mask: str | None = None):
        if not isinstance(plan, Plan):
            raise ValueError(f"[step] plan must be what blockcp.plan returns, but it is {plan!r}.")
        if mask is None and len(plan.choice) == 1:
            mask = next(iter(plan.choice))
        if mask is not None and mask not in plan.choice:
            raise ValueError(f"[step] mask must be one of the plan's {list(plan.choice)}, but it is {mask!r}.")
        self.plan, self.mask = plan, mask
        self.group = group_name(group, plan.world_size)
        self._first_call = True
        self._calls_before = 0
        self._calls: int | None = 0  # None while open: the plan counts, compiled calls included

    @property
    def calls(self) -> int:
        """Attention calls of this step that took the context-parallel path, recomputations included."""
        return self._calls if self._calls is not None else ops.plan_calls(self.plan.handle) - self._calls_before

    def enter_call(self) -> bool:
        """Whether this is the step's first call; compiled ones, which Python does not see, are not counted here."""
        with _lock:
            first, self._first_call = self._first_call, False
            return first

    def __enter__(self) -> Step:
        from blockcp.sdpa import sdpa

        self._first_call = True
        self._calls_before, self._calls = ops.plan_calls(self.plan.handle), None
        with _lock:
            if not _active:
                _replaced.append(F.scaled_dot_product_attention)
                F.scaled_dot_product_attention = sdpa
            _active.append(self)
        _stack().append(self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._calls = self.calls
        _stack().remove(self)
        with _lock:
            _active.remove(self)
            if not _active:
                F.scaled_dot_product_attention = _replaced.pop()
        if kind is None and self._calls == 0:
            raise RuntimeError(
                "[step] at least one attention call must take the context-parallel path in a step, but none of this "
                f"one did (plan: {self.plan!r}). Does the model call F.scaled_dot_product_attention with "
                "the plan's batch and rows, or blockcp.attention?"
            )


def current_step() -> Step | None:
    """This thread's innermost step, else the only open one of all threads, else None.

    Raises:
        RuntimeError: this thread has none, and several others have.
    """
    stack = _stack()
    if stack:
        return stack[-1]
    with _lock:
        if len(_active) > 1:
            raise RuntimeError(
                f"[step] a thread without a step of its own must find one open step, but there are {len(_active)}. "
                "Open a step in this thread, or pass the plan to blockcp.attention."
            )
        return _active[0] if _active else None


def counting_step(plan: Plan) -> Step | None:
    """The open step that a direct call with ``plan`` counts in."""
    if torch.compiler.is_compiling() or not _active:
        return None
    stack = _stack() or list(_active)
    return next((step for step in reversed(stack) if step.plan is plan), None)


class local:
    """``with blockcp.local():`` attention calls of this thread go to torch's own function, inside a step too."""

    def __enter__(self) -> local:
        _thread.local_depth = getattr(_thread, "local_depth", 0) + 1
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _thread.local_depth -= 1


def is_local() -> bool:
    return getattr(_thread, "local_depth", 0) > 0


def replaced_sdpa() -> Any:
    """What F.scaled_dot_product_attention was before the open steps, or None."""
    return _replaced[0] if _replaced else None


def _stack() -> list[Step]:
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    return _thread.stack
