"""The attention kernel alone, on packed documents of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockcp._library import ops
from blockcp.arguments import as_int, as_scale, check_tensors
from blockcp.mask import Mask

Offsets = torch.Tensor | Sequence[int]


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Offsets,
    cu_seqlens_k: Offsets,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention inside each document, with flash-attention's varlen conventions; differentiable. No group, no plan.

    Document i has query rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` and key rows likewise. The mask is aligned
    at the bottom right: with lq queries and lk keys, query i stands at position ``i + lk - lq`` of the keys. A row that
    sees no key gets out 0, lse -inf and no gradient; so do rows from the last offset on, and dk and dv there are 0.

    Args:
        q: ``[Tq, Hq, D]`` of fp32, fp64, bf16 or fp16, any strides.
        k: ``[Tk, Hkv, D]``, Hkv divides Hq.
        v: ``[Tk, Hkv, Dv]``.
        cu_seqlens_q: ``[documents + 1]`` int32 or int64 on the CPU, or a list: begins with 0, never decreases, ends
            inside the tensor.
        cu_seqlens_k: the same for k and v, of as many documents.
        max_seqlen_q: not needed; checked if given, and must then be no less than the longest document.
        max_seqlen_k: the same for keys.
        causal: a row sees no key after its position.
        window: as in :class:`blockcp.Mask`: None or -1 is unbounded; an integer w >= 1 counts keys, the row's own
            included (without ``causal`` that many on either side); a pair ``(left, right)`` counts as flash-attention's
            ``window_size`` does, -1 or None is unbounded, and ``right`` must be 0 under ``causal``.
        scale: of the scores before the softmax; None is ``D ** -0.5``.
        return_lse: also return the natural log-sum-exp, ``[Hq, Tq]``, fp32 (fp64 for fp64), not differentiable.
        kernel: a name or family ("reference", "cpu"); None is the best.

    Returns:
        out, ``[Tq, Hq, Dv]`` like q and contiguous.

    Raises:
        ValueError: tensors or offsets that do not fit, with their values.
    """
    check_tensors("varlen", 1, q=q, k=k, v=v)
    out, lse = ops.varlen(
        q,
        k,
        v,
        _offsets(cu_seqlens_q, "cu_seqlens_q"),
        _offsets(cu_seqlens_k, "cu_seqlens_k"),
        _longest(max_seqlen_q, "max_seqlen_q"),
        _longest(max_seqlen_k, "max_seqlen_k"),
        bool(causal),
        _window(causal, window),
        as_scale(scale, "varlen"),
        _kernel(kernel),
    )
    return (out, lse) if return_lse else out


def _offsets(values: Offsets, name: str) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        try:
            values = torch.tensor(values)  # a copy: backward needs the numbers of forward
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"[varlen] {name} must be integers, but it is {values!r}: {error}.") from error
    if values.layout != torch.strided:
        raise ValueError(f"[varlen] {name} must be dense, but its layout is {values.layout}.")
    if values.device.type != "cpu":
        raise ValueError(f"[varlen] {name} must be on the CPU in this build, but it is on {values.device}.")
    return values


def _kernel(kernel: Any) -> str:
    if kernel is None or isinstance(kernel, str):
        return kernel or ""
    raise ValueError(f"[varlen] kernel must be a name or None, but it is {kernel!r}.")


def _longest(value: Any, name: str) -> int | None:
    return None if value is None else as_int(value, f"[varlen] {name}")


def _window(causal: bool, window: Any) -> list[int]:
    window = Mask(causal=causal, window=window).window
    if window is None:
        return []
    return [-1 if side is None else side for side in window] if isinstance(window, tuple) else [window]
