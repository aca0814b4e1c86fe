"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from blockcp._library import define_check, ops
from blockcp.attention import run
from blockcp.plan import Plan
from blockcp.step import Step, current_step, is_local, note_call, replaced_sdpa

_torch_sdpa = F.scaled_dot_product_attention


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Context-parallel attention inside :class:`blockcp.step`, the stock function outside.

    Inside a step, calls whose batch and rows are not the plan's (vision towers, cross-attention), and calls under
    :class:`blockcp.local`, go to the stock function. For the others the plan's mask decides:

    - ``attn_mask=None``: the plan's mask, whatever ``is_causal=False`` says (models that build their mask elsewhere
      pass that); ``is_causal=True`` under a plan mask that is not causal is an error.
    - ``attn_mask`` equal to the plan's on the rows that are not padding (bool, or 0 and -inf; broadcastable to
      ``[B, Hq, L, S]``): the same result. Any other, a local ``[L, L]`` one included, is an error.
    - ``attn_mask`` with ``is_causal``, dropout, or different heads without ``enable_gqa``: an error.

    Errors are ValueErrors, and raised on every rank together.
    """
    step = None if is_local() else current_step()
    if step is None or not _fits(step, query, key, value):
        return _stock()(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    note_call(step.plan)
    trouble = _trouble(step, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and not trouble:
        ops.check_mask(attn_mask, step.plan.handle, step.mask or "", step.group, step.plan.rank)
    return run(query, key, value, step.plan, step.mask, step.group, scale, None, None, step, trouble)[0]


def _stock() -> Any:
    before = replaced_sdpa()
    return _torch_sdpa if before is None or before is sdpa else before


def _fits(step: Step, query: Any, key: Any, value: Any) -> bool:
    """What is no tensor fits too: no function takes it, and here all ranks are told."""
    wanted = (step.plan.batch, step.plan.local_rows)
    tensors = [x for x in (query, key, value) if isinstance(x, torch.Tensor)]
    return all(not x.is_nested and x.dim() == 4 and (x.shape[0], x.shape[2]) == wanted for x in tensors)


def _trouble(
    step: Step,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    enable_gqa: Any,
) -> str:
    """What is wrong with the call, or nothing; attention itself looks at scale and closer at the tensors."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            return f"[sdpa] {name} must be a tensor, but it is {type(x).__name__}."
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            return f"[sdpa] {name} must be True or False, but it is {type(flag).__name__}."
    if not isinstance(dropout_p, (int, float)):
        return f"[sdpa] dropout_p must be a number, but it is {type(dropout_p).__name__}."
    if dropout_p:
        return f"[sdpa] dropout must be 0 in a context-parallel step, but dropout_p is {dropout_p}. Turn it off."
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return (
            f"[sdpa] query and key must have the same heads without enable_gqa, but they have {query.shape[1]} and "
            f"{key.shape[1]}. Pass enable_gqa=True."
        )
    if attn_mask is not None and is_causal:
        return "[sdpa] attn_mask or is_causal must be given, but both are. Leave one out."
    if is_causal and step.mask is not None and not step.plan.causal[step.mask]:
        return f'[sdpa] is_causal must fit the plan, but its mask "{step.mask}" is not causal. Declare a causal one.'
    return "" if attn_mask is None else _mask_trouble(step.plan, query, attn_mask)


_CURE = "Pass attn_mask=None, or declare this mask in blockcp.plan(masks=...)."


def _mask_trouble(plan: Plan, query: torch.Tensor, attn_mask: Any) -> str:
    """What is wrong before its values are looked at."""
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.layout != torch.strided or attn_mask.is_nested:
        return f"[sdpa] attn_mask must be a dense tensor, but it is {type(attn_mask).__name__}. {_CURE}"
    if attn_mask.device != query.device or attn_mask.requires_grad:
        return (
            f"[sdpa] attn_mask must be on {query.device} like query and need no gradient, but it is on "
            f"{attn_mask.device} and requires_grad is {attn_mask.requires_grad}. {_CURE}"
        )
    full = [query.shape[0], query.shape[1], plan.local_rows, plan.rows]
    shape = list(attn_mask.shape)
    leading = zip(reversed(shape[:-2]), (full[1], full[0]))
    if 2 <= len(shape) <= 4 and shape[-2:] == full[2:] and all(size in (1, whole) for size, whole in leading):
        return ""
    return f"[sdpa] attn_mask must have the shape {full}, less or 1 in the first two, but its shape is {shape}. {_CURE}"


def _check_mask(attn_mask: torch.Tensor, handle: torch.Tensor, mask: str, group: str, rank: int) -> None:
    try:
        trouble = _other_values(attn_mask, handle, mask, rank)
    except Exception as error:  # the other ranks are on their way into the call: whatever it is must reach them
        reason = str(error).partition("\n")[0]
        trouble = f"attn_mask must be the plan's mask, but it cannot be compared: {reason}."
    if trouble:
        nothing = torch.empty(0)
        ops.attention(nothing, nothing, nothing, handle, group=group, trouble=f"[sdpa] {trouble} {_CURE}")


def _other_values(attn_mask: torch.Tensor, handle: torch.Tensor, mask: str, rank: int) -> str:
    seen = attn_mask
    if attn_mask.dtype != torch.bool:
        seen = attn_mask == 0
        if not bool((seen | (attn_mask == -torch.inf)).all()):
            return "attn_mask must be bool or 0 and -inf, but it has other values."
    while seen.dim() < 4:
        seen = seen.unsqueeze(0)
    real = (ops.plan_rows(handle, rank)[0] != 0)[:, None, :, None].to(seen.device)
    wrong = ((seen != ops.plan_visible(handle, mask, rank)[:, None].to(seen.device)) & real).nonzero()
    if len(wrong) == 0:
        return ""
    _, _, row, column = wrong[0].tolist()
    return (
        f'attn_mask must be the plan\'s mask "{mask}", but it differs in {len(wrong)} places, first local row {row}, '
        f"key {column}."
    )


# An op, so that its values are compared when a compiled graph runs.
define_check("check_mask(Tensor attn_mask, Tensor plan, str mask, str group, int rank) -> ()", _check_mask)
