"""From whole batches to this rank's rows, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from blockcp.arguments import as_int, check_tensors, seen, trouble_of
from blockcp.exchange import all_gather, place_in, refuse
from blockcp.plan import Plan

ALIGNED = ("input_ids", "inputs_embeds", "labels", "loss_mask", "position_ids", "shift_labels", "token_type_ids")
IGNORED = -100  # the label that torch's cross entropy leaves out


def shard(batch: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """This rank's rows of a batch that every rank holds whole.

    Args:
        batch: tensors and anything else by name. A tensor is sequence-aligned where its shape is ``[B, S, ...]``,
            ``[S]`` or ``[3, B, S]``; S is the plan's rows, before or after its padding.
        plan: of this batch and rank.

    Returns:
        A new dict: sequence-aligned tensors padded to the plan's rows (``labels`` with -100, others with 0) and cut to
        ``L`` rows; ``shift_labels``, where there are ``labels``: the next row's label, -100 at the end of a document;
        ``position_ids``, counted in documents, where the batch has none. ``attention_mask``, and tensors of
        ``[..., S, S]`` with "mask" in their name, are dropped: the plan knows better. Everything else is passed on as
        it is.

    Raises:
        ValueError: a field that is sequence-aligned by its name (``input_ids``, ``labels``, ``position_ids``,
            ``loss_mask`` and the like) is not of the plan's size.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"[shard] plan must be what blockcp.plan returns, but it is {seen(plan)}.")
    if not isinstance(batch, Mapping):
        raise ValueError(f"[shard] batch must be a dict of tensors by name, but it is {seen(batch)}.")
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and not labels.dtype.is_signed:
        raise ValueError(f"[shard] labels must be signed, for -100 is no label, but they are {labels.dtype}.")
    result: dict[str, Any] = {}
    for name, value in batch.items():
        if name == "attention_mask" or _is_square_mask(name, value, plan):
            continue
        dim = _sequence_dim(value, plan)
        if dim is None and name in ALIGNED and value is not None:
            found = seen(value) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"[shard] {name} must be a tensor of [{plan.batch}, {plan.given_rows}, ...] like the plan, but it is "
                f"{found}. Was the plan made from another batch?"
            )
        result[name] = value if dim is None else _local(_padded(name, value, dim, plan), dim, plan)
    if batch.get("labels") is not None:
        labels = _padded("labels", batch["labels"], _label_dim(batch["labels"], plan), plan)
        result["shift_labels"] = _local(_shifted(labels, plan), labels.dim() - 1, plan)
    if batch.get("position_ids") is None:
        result["position_ids"] = plan.position_ids.to(_device(batch))
    return result


def unshard(tensor: torch.Tensor, plan: Plan, group: Any = None, dim: int = 1) -> torch.Tensor:
    """The whole of a tensor that is spread over the group, without the rows that the plan added; differentiable.

    Args:
        tensor: ``[..., L, ...]`` with the plan's local rows along ``dim``.
        group: as for :func:`blockcp.attention`.

    Returns:
        ``[..., S, ...]`` with the rows that the plan was given, on every rank.
    """
    world_size = plan.world_size if isinstance(plan, Plan) else None
    alone = world_size == 1 and group is None
    world = 1 if alone else place_in(group, world_size).world
    try:
        _check_part(tensor, plan, world, dim)
    except Exception as error:
        refuse("" if alone else group, trouble_of(error, "shard"))
    whole = tensor if alone else all_gather(tensor, group, dim)
    return whole.narrow(dim, 0, plan.given_rows)


def _check_part(tensor: Any, plan: Any, world: int, dim: Any) -> None:
    if not isinstance(plan, Plan):
        raise ValueError(f"[shard] plan must be what blockcp.plan returns, but it is {seen(plan)}.")
    if plan.world_size != world:
        raise ValueError(
            f"[shard] the plan and the group must have the same ranks, but the plan is for {plan.world_size} and the "
            f"group has {world}. Pass the group that the plan was made for."
        )
    check_tensors("shard", world, tensor=tensor)
    dim = as_int(dim, "[shard] dim")
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != plan.local_rows:
        raise ValueError(
            f"[shard] the tensor must have the plan's {plan.local_rows} local rows along dim {dim}, but its shape is "
            f"{list(tensor.shape)}."
        )


def _sequence_dim(value: Any, plan: Plan) -> int | None:
    """Which dimension of a value is the sequence, if any."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        return None
    shape, sizes = tuple(value.shape), (plan.given_rows, plan.rows)
    if len(shape) >= 2 and shape[0] == plan.batch and shape[1] in sizes:
        return 1
    if len(shape) == 1 and shape[0] in sizes:
        return 0
    if len(shape) == 3 and shape[0] == 3 and shape[1] == plan.batch and shape[2] in sizes:
        return 2
    return None


def _label_dim(labels: torch.Tensor, plan: Plan) -> int:
    dim = _sequence_dim(labels, plan)
    if dim != labels.dim() - 1 or (dim == 0 and plan.batch != 1) or dim == 2:
        raise ValueError(
            f"[shard] labels must be a tensor of [{plan.batch}, {plan.given_rows}] like the plan, but it is "
            f"{seen(labels)}."
        )
    return dim


def _is_square_mask(name: Any, value: Any, plan: Plan) -> bool:
    if not isinstance(name, str) or "mask" not in name or not isinstance(value, torch.Tensor):
        return False
    if value.is_nested or value.dim() < 2:
        return False
    return tuple(value.shape[-2:]) in ((plan.given_rows,) * 2, (plan.rows,) * 2)


def _padded(name: str, value: torch.Tensor, dim: int, plan: Plan) -> torch.Tensor:
    missing = plan.rows - value.shape[dim]
    after = [0, 0] * (value.dim() - 1 - dim) + [0, missing]  # F.pad counts dimensions from the last
    return F.pad(value, after, value=IGNORED if name in ("labels", "shift_labels") else 0) if missing else value


def _local(value: torch.Tensor, dim: int, plan: Plan) -> torch.Tensor:
    return value.narrow(dim, plan.rank * plan.local_rows, plan.local_rows).contiguous()


def _shifted(labels: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The label of the next row, which may lie on the next rank; none at the end of a document and in padding."""
    ids = plan.global_doc_ids.to(labels.device)
    inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, :-1] != 0)
    inside = F.pad(inside, (0, 1))
    following = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return following.masked_fill(~inside.reshape(following.shape), IGNORED)


def _device(batch: Mapping[str, Any]) -> torch.device:
    tensors = (value for value in batch.values() if isinstance(value, torch.Tensor))
    return next(tensors, torch.empty(0)).device
