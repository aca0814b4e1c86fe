"""An independent oracle: dense masked attention over whole sequences from a predicate, with autograd."""

from __future__ import annotations

import torch


def visible(ids, causal=True, window=None, spans=None, span_window="left") -> torch.Tensor:
    """``[B, S, S]``: may row i see row j? ``window`` as in blockcp.Mask."""
    ids = torch.as_tensor(ids)
    ids = ids if ids.dim() == 2 else ids[None]
    batch, rows = ids.shape
    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None, :]
    left, right = _sides(window, causal)
    back = (i - j <= left) if left is not None else torch.ones(rows, rows, dtype=torch.bool)
    ahead = (j - i <= right) if right is not None else torch.ones(rows, rows, dtype=torch.bool)
    order = (j <= i) if causal else torch.ones(rows, rows, dtype=torch.bool)
    seen = (order & back & ahead)[None].expand(batch, rows, rows)
    if spans is not None:
        spans = torch.as_tensor(spans)
        spans = (spans if spans.dim() == 2 else spans[None]).expand(batch, rows)
        same = (spans[:, :, None] == spans[:, None, :]) & (spans[:, :, None] != 0)
        both = back if left is None else back & (j - i <= left)
        free = order[None] | same
        if not causal:
            free = free & (ahead[None] | same)
        seen = {"left": free & back, "both": free & both, "none": seen | same}[span_window]
    documents = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] != 0)
    return seen & documents


def _sides(window, causal):
    if window is None or (not isinstance(window, tuple) and window == -1):
        return None, (0 if causal else None)
    if isinstance(window, tuple):
        left, right = (None if side in (None, -1) else side for side in window)
        return left, (0 if causal else right)
    return window - 1, (0 if causal else window - 1)


def attention(q, k, v, seen, scale=None):
    """``(out [B, Hq, S, Dv], lse [B, Hq, S])`` in the type of the inputs; a row without keys gives 0 and -inf."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v, seen = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), seen[:, None]
    scores = torch.where(seen, scale * (q @ k.transpose(-1, -2)), -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(-1e30)
    weights = torch.where(seen, torch.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.clamp_min(1e-300 if q.dtype == torch.float64 else 1e-38)) @ v
    return out, (top + total.log())[..., 0]


def gradients(q, k, v, dout, seen, scale=None, dtype=torch.float64):
    """``(out, lse, dq, dk, dv)`` computed in ``dtype``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, seen, scale)
    out.backward(dout.to(dtype))
    return out.detach(), lse.detach(), *(x.grad for x in leaves)


def weights(q, k, seen, scale=None):
    """``[B, Hq, S, S]`` in fp64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.detach().to(torch.float64), k.detach().to(torch.float64).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.where(seen[:, None], scale * (q @ k.transpose(-1, -2)), -torch.inf)
    return torch.where(seen[:, None], scores.softmax(-1), 0.0)


def size_of_scores(q, k, seen, scale=None) -> float:
    """The largest sum of the sizes of the terms of a score."""
    scale = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.detach().to(torch.float64).abs() for x in (q, k))
    sizes = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2))
    return sizes.masked_fill(~seen[:, None], 0).max().item() if sizes.numel() else 0.0


def sizes_of_terms(q, k, v, dout, seen, scale=None):
    """For every element of ``(out, lse, dq, dk, dv)``, the sum of the sizes of the terms that it is summed from, where
    the terms may cancel: relative errors of e in all weights or products change the element by about e times that.
    For lse, whose error is that of the weights, 1; 0 where a row sees no key."""
    p = weights(q, k, seen, scale)
    scale = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v, dout = (x.detach().to(torch.float64).abs() for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = p @ wide_v
    ds = p * (dout @ wide_v.transpose(-1, -2) + (out * dout).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.transpose(-1, -2) @ rows).unflatten(1, (k.shape[1], group)).sum(2) for x, rows in ((ds, q), (p, dout)))
    return out, p.sum(-1).round(), ds @ wide_k, dk, dv
