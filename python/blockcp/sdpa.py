"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from blockcp.attention import run
from blockcp.step import Step, current_step, is_local, replaced_sdpa

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
    trouble = _trouble(step, query, key, attn_mask, dropout_p, is_causal, enable_gqa)
    return run(query, key, value, step.plan, step.mask, step.group, scale, None, None, step, trouble)[0]


def _stock() -> Any:
    before = replaced_sdpa()
    return _torch_sdpa if before is None or before is sdpa else before


def _fits(step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    wanted = (step.plan.batch, step.plan.local_rows)
    return all(x.dim() == 4 and (x.shape[0], x.shape[2]) == wanted for x in (query, key, value))


def _trouble(
    step: Step,
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """What is wrong with the call, or nothing."""
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
    return "" if attn_mask is None else _mask_trouble(step, attn_mask)


def _mask_trouble(step: Step, attn_mask: torch.Tensor) -> str:
    plan, shape = step.plan, tuple(attn_mask.shape)
    cure = "Pass attn_mask=None, or declare this mask in blockcp.plan(masks=...)."
    if attn_mask.dim() < 2 or shape[-2:] != (plan.local_rows, plan.rows):
        return (
            f"[sdpa] attn_mask must be the plan's own, whose last sizes are {plan.local_rows} and {plan.rows}, but its "
            f"shape is {list(shape)}. {cure}"
        )
    seen = attn_mask
    if attn_mask.dtype != torch.bool:
        seen = attn_mask == 0
        if not bool((seen | (attn_mask == -torch.inf)).all()):
            return f"[sdpa] attn_mask must be bool or 0 and -inf, but it has other values. {cure}"
    while seen.dim() < 4:
        seen = seen.unsqueeze(0)
    real = (plan.doc_ids != 0)[:, None, :, None].to(seen.device)
    wrong = ((seen != plan.visible(step.mask)[:, None].to(seen.device)) & real).nonzero()
    if len(wrong) == 0:
        return ""
    _, _, row, column = wrong[0].tolist()
    return (
        f'[sdpa] attn_mask must be the plan\'s mask "{step.mask or ""}", but it differs in {len(wrong)} places, first '
        f"local row {row}, key {column}. {cure}"
    )
