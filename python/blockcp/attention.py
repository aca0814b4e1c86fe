"""Attention over packed documents whose rows are spread over a process group."""

from __future__ import annotations

from typing import Any

import torch

from blockcp._library import ops
from blockcp.groups import group_name
from blockcp.plan import Plan
from blockcp.step import Step, counting_step


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    mask: str | None = None,
    group: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    format: str = "bhld",
    kernel: str | None = None,
    agreement: str | None = None,
    reproducible: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's query rows over the keys of all ranks; differentiable.

    Every rank of the group calls it, a rank that holds only padding included. Nothing is scaled by the number of ranks:
    with a loss that sums over all rows, gradients of weights summed over ranks are those of one rank.

    Args:
        q: ``[B, Hq, L, D]`` of fp32, fp64, bf16 or fp16, any strides; with ``format="blhd"`` ``[B, L, Hq, D]``.
        k: ``[B, Hkv, L, D]``, Hkv divides Hq.
        v: ``[B, Hkv, L, Dv]``.
        plan: of this batch and rank.
        mask: the name of one of the plan's masks; may be left out where there is one.
        group: a ProcessGroup, its name or a one-dimensional DeviceMesh; None is the default group.
        scale: of the scores before the softmax; None is ``D ** -0.5``.
        return_lse: also return the natural log-sum-exp, ``[B, Hq, L]``, fp32 (fp64 for fp64), not differentiable;
            -inf for padding.
        format: "bhld" or "blhd", for inputs and output; never guessed from sizes.
        kernel: a name or family ("reference", "cpu"); None is the best.
        agreement: "call": all ranks compare the call before anything is sent, so that a mistake on one rank is one
            error on all; "step": only the first call of an open :class:`blockcp.step` is compared, and later ones only
            checked locally. None is "call" on the CPU.
        reproducible: the ordered schedule. It is the only one so far, so this changes nothing yet.

    Returns:
        out, ``[B, Hq, L, Dv]`` like q and contiguous (a transposed view of that for "blhd"); 0 for padding.

    Raises:
        ValueError: arguments that do not fit the plan, the group or other ranks' arguments; on every rank.
        RuntimeError: a kernel that fails on one rank, on every rank; a peer that is gone. After that one the group is
            broken and later calls raise at once.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"[torch] plan must be what blockcp.plan returns, but it is {plan!r}.")
    trouble = _trouble(q, k, v, mask, scale, format, kernel, agreement)
    if trouble:  # told to the other ranks, which are on their way into the same call
        q = k = v = torch.empty(0)
        mask = scale = kernel = agreement = None
    if format == "blhd":
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    step = counting_step(plan)
    out, lse = run(q, k, v, plan, mask, group_name(group, plan.world_size), scale, kernel, agreement, step, trouble)
    if format == "blhd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    mask: str | None,
    group: str,
    scale: float | None,
    kernel: str | None,
    agreement: str | None,
    step: Step | None,
    trouble: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op, counted in ``step``.

    ``trouble``: an error found in this rank's arguments. All ranks raise it, and those found here as well: the others
    are on their way into the same call.
    """
    trouble = trouble or _trouble(q, k, v, mask, scale, "bhld", kernel, agreement)
    if trouble:
        q = k = v = torch.empty(0, 0, 0, 0)
        mask = scale = kernel = agreement = None
    first = step is None or step.enter_call()
    scale = None if scale is None else float(scale)
    agree = agreement != "step" or first
    return ops.attention(q, k, v, plan.handle, mask or "", group, scale, kernel or "", agree, trouble=trouble)


def _trouble(q: Any, k: Any, v: Any, mask: Any, scale: Any, format: Any, kernel: Any, agreement: Any) -> str:
    """What is wrong with arguments that the op could not even be called with, or nothing."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            seen = f"a {x.layout} one" if isinstance(x, torch.Tensor) else type(x).__name__
            return f"[torch] {name} must be a dense tensor, but it is {seen}."
    if format not in ("bhld", "blhd"):
        return f'[torch] format must be "bhld" or "blhd", but it is {format!r}.'
    if agreement not in (None, "call", "step"):
        return f'[torch] agreement must be "call" or "step", but it is {agreement!r}.'
    for name, text in (("mask", mask), ("kernel", kernel)):
        if text is not None and not isinstance(text, str):
            return f"[torch] {name} must be a name, but it is {text!r}."
    if isinstance(scale, (str, bytes, bool, complex)) or (scale is not None and not hasattr(scale, "__float__")):
        return f"[torch] scale must be a number, but it is {scale!r}."
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        return f"[torch] scale must be a number, but it is a tensor of shape {list(scale.shape)}."
    return ""


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2) if x.dim() == 4 else x
