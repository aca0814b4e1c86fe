"""Attention over packed documents whose rows are spread over a process group."""

from __future__ import annotations

from typing import Any

import torch

from blockcp._library import ops
from blockcp.arguments import as_scale, check_tensors, seen, trouble_of
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
    trouble = ""
    if not isinstance(format, str) or format not in ("bhld", "blhd"):
        trouble = f'[torch] format must be "bhld" or "blhd", but it is {seen(format)}.'
    heads_last = not trouble and format == "blhd"
    if heads_last:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    name = group_name(group, plan.world_size if isinstance(plan, Plan) else None)
    out, lse = run(q, k, v, plan, mask, name, scale, kernel, agreement, counting_step(plan), trouble)
    if heads_last:
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
    first = step is None or step.enter_call()
    agree = first or not (isinstance(agreement, str) and agreement == "step")
    try:
        _check(q, k, v, plan, mask, kernel, agreement)
        scale = as_scale(scale, "torch")
    except Exception as error:
        trouble = trouble or trouble_of(error, "torch")
    if trouble:
        nothing = torch.empty(0, 0, 0, 0, device="cpu")
        return ops.attention(nothing, nothing, nothing, nothing, "", group, None, "", agree, trouble=trouble)
    return ops.attention(q, k, v, plan.handle, mask or "", group, scale, kernel or "", agree)


def _check(q: Any, k: Any, v: Any, plan: Any, mask: Any, kernel: Any, agreement: Any) -> None:
    """Raises ValueError for arguments that the op could not even be called with."""
    if not isinstance(plan, Plan):
        raise ValueError(f"[torch] plan must be what blockcp.plan returns, but it is {seen(plan)}.")
    check_tensors("torch", plan.world_size, q=q, k=k, v=v)
    if agreement is not None and (not isinstance(agreement, str) or agreement not in ("call", "step")):
        raise ValueError(f'[torch] agreement must be "call" or "step", but it is {seen(agreement)}.')
    for name, text in (("mask", mask), ("kernel", kernel)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"[torch] {name} must be a name, but it is {seen(text)}.")


def _heads_first(x: Any) -> Any:
    dense = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
    return x.transpose(1, 2) if dense and x.dim() == 4 else x
