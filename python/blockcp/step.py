"""The plan of the training step under way, for code that calls attention without knowing of plans."""

from __future__ import annotations

import sys
import threading
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.nn.functional as F

from blockcp._library import define_check, ops
from blockcp.groups import group_name
from blockcp.plan import Plan

# Tuples that are replaced and never changed: calls read them without the lock, which Dynamo could not trace.
_active: tuple[Step, ...] = ()  # over all threads, in the order they were opened
_replaced: Any = None  # what F.scaled_dot_product_attention was before the first open step
_lock = threading.Lock()  # of the two above, when they are replaced
_thread = threading.local()  # of one thread: steps, local_depth
_never_filled: list[None] = []

_CURE = "Run the backward inside the step, evaluate under torch.no_grad(), or pass the plan to blockcp.attention."


class Step:
    """While open, ``torch.nn.functional.scaled_dot_product_attention`` is :func:`blockcp.sdpa`, in every thread.

    ::

        with blockcp.step(plan, group):
            loss = model(**shard).loss
            loss.backward()

    Steps nest. Other threads (autograd's, a data loader's) find the step that is open where only one is. Leaving a step
    in which no attention call took the context-parallel path is a RuntimeError: the model then attends locally, which
    is silently wrong.

    Where activations are checkpointed, the backward belongs inside the step: a recomputation after it would call
    torch's own attention. With ``use_reentrant=True`` leaving a step before its backward is a RuntimeError, and so is a
    backward outside it; with ``use_reentrant=False`` torch raises a CheckpointError in a backward outside all steps. In
    another step, or in one with another mask, such a recomputation takes that one's plan, and nothing notices. Of other
    checkpoints those are known whose ``forward(ctx, ...)`` runs the function. Nothing is waited for under
    ``torch.no_grad()``, where the graph is gone, and for calls of :func:`blockcp.attention`, which carry their plan.

    ``torch.compile`` takes the calls into its graph, with ``fullgraph=True`` too if the step is opened outside. A new
    plan is no new compilation as long as its batch and rows are the same.

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
        if mask is not None and (not isinstance(mask, str) or mask not in plan.choice):
            raise ValueError(f"[step] mask must be one of the plan's {list(plan.choice)}, but it is {mask!r}.")
        self.plan, self.mask = plan, mask
        self.group = group_name(group, plan.world_size)
        self._first_call = True
        self._awaiting: WeakSet[Any] = WeakSet()  # checkpoints' nodes in the graph that have yet to run again
        self._calls_before = 0
        self._calls: int | None = 0  # None while open: the plan counts, compiled calls included

    @property
    def calls(self) -> int:
        """Attention calls of this step that took the context-parallel path, recomputations included."""
        with _lock:  # at which Dynamo gives up: the op below can only be run
            return self._calls if self._calls is not None else ops.plan_calls(self.plan.handle) - self._calls_before

    def enter_call(self) -> bool:
        """Whether this is the step's first call; compiled ones, which Python does not see, are not counted here."""
        if torch.compiler.is_compiling():
            _leave_checkpoints_uncompiled()
            return True
        with _lock:
            first, self._first_call = self._first_call, False
            return first

    def await_recomputation(self, node: Any) -> None:
        """``node``, of the autograd graph, will run attention of this step again in its backward."""
        with _lock:
            if node not in self._awaiting:
                self._awaiting.add(node)
                weak = ref(node)  # the node must not keep itself alive
                node.register_prehook(lambda _: self._before_recomputation(weak()))

    def _before_recomputation(self, node: Any) -> None:
        with _lock:
            self._awaiting.discard(node)
        if is_local() or current_step() is not self:
            raise RuntimeError(
                "[step] attention calls in a checkpoint must be computed again in the step of their forward, but this "
                f"backward runs outside it (plan: {self.plan!r}). {_CURE}"
            )

    def __enter__(self) -> Step:
        from blockcp.sdpa import sdpa

        global _active, _replaced
        with _lock:
            self._first_call = True
            self._awaiting = WeakSet()
            self._calls_before, self._calls = ops.plan_calls(self.plan.handle), None
            if not _active:
                _replaced, F.scaled_dot_product_attention = F.scaled_dot_product_attention, sdpa
            _active += (self,)
            _thread.steps = (*_own_steps(), self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        global _active, _replaced
        self._calls = self.calls
        with _lock:
            _thread.steps = _without(_own_steps(), self)
            _active = _without(_active, self)
            if not _active:
                F.scaled_dot_product_attention, _replaced = _replaced, None
        if kind is None:
            self._check_complete()

    def _check_complete(self) -> None:
        if self._calls == 0:
            raise RuntimeError(
                "[step] at least one attention call must take the context-parallel path in a step, but none of this "
                f"one did (plan: {self.plan!r}). Does the model call F.scaled_dot_product_attention with "
                "the plan's batch and rows, or blockcp.attention?"
            )
        if len(self._awaiting):
            raise RuntimeError(
                "[step] attention calls in a checkpoint must be computed again before their step is left, but "
                f"{len(self._awaiting)} of its reentrant checkpoints have had no backward (plan: {self.plan!r}). "
                f"{_CURE}"
            )


def current_step() -> Step | None:
    """This thread's innermost step, else the only open one of all threads, else None.

    Raises:
        RuntimeError: this thread has none, and several others have.
    """
    own = _own_steps()
    if own:
        return own[-1]
    active = _active
    if len(active) > 1:
        raise RuntimeError(
            f"[step] a thread without a step of its own must find one open step, but there are {len(active)}. "
            "Open a step in this thread, or pass the plan to blockcp.attention."
        )
    return active[0] if active else None


def counting_step(plan: Plan) -> Step | None:
    """The open step that a direct call with ``plan`` counts in."""
    if torch.compiler.is_compiling():
        _leave_checkpoints_uncompiled()
        return None
    steps = _own_steps() or _active
    return next((step for step in reversed(steps) if step.plan is plan), None)


class local:
    """``with blockcp.local():`` attention calls of this thread go to torch's own function, inside a step too.

    Where activations are checkpointed it belongs inside the checkpointed function, which runs again in the backward.
    """

    def __enter__(self) -> local:
        _thread.local_depth = getattr(_thread, "local_depth", 0) + 1
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _thread.local_depth -= 1


def is_local() -> bool:
    return getattr(_thread, "local_depth", 0) > 0


def replaced_sdpa() -> Any:
    """What F.scaled_dot_product_attention was before the open steps, or None."""
    return _replaced


def note_call(plan: Plan) -> None:
    """Before a call that found its plan in a step: whether a checkpoint will run it again is noted there."""
    if not torch.is_grad_enabled():  # as in the forward of a reentrant checkpoint
        ops.note_no_grad_call(plan.handle)


def _note_no_grad_call(handle: torch.Tensor) -> None:
    # torch's checkpoint with use_reentrant=True, and others written after it, run their function in the forward of an
    # autograd Function, whose ctx is the node that runs it again. Nodes of no graph are gone as soon as that returns.
    step, frame = current_step(), sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames[:1] == ("ctx",):
            node = frame.f_locals.get("ctx")
            if step is not None and isinstance(node, torch.autograd.graph.Node):
                step.await_recomputation(node)
        frame = frame.f_back


define_check("note_no_grad_call(Tensor plan) -> ()", _note_no_grad_call)


def _leave_checkpoints_uncompiled() -> None:
    """While tracing: a graph break if a checkpoint is traced, which then runs as it would without a compiler.

    AOTAutograd cannot run ops again that keep their order. What Dynamo refuses to trace in a checkpoint, and traces in
    the other places where these ops can be, is a change of what lies outside, even if it changes nothing.
    """
    _never_filled.clear()


def _own_steps() -> tuple[Step, ...]:
    return getattr(_thread, "steps", ())


def _without(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    place = steps.index(step)
    return steps[:place] + steps[place + 1 :]
