"""Three differentiable collectives along a sequence dimension, on their own.

All of them are collective: every rank of the group calls them in the same order, in the backward too. Ranks compare
their splits before anything is sent; a difference is a ValueError on every rank. Gradients that meet are summed in fp32
(fp64 for fp64) by ascending rank and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from blockcp._library import ops
from blockcp.groups import group_name, rank_and_size


def all_gather(x: torch.Tensor, group: Any = None, dim: int = -2) -> torch.Tensor:
    """Every rank's ``x`` along ``dim``, in rank order; the backward is a reduce-scatter that sums.

    Args:
        x: ``[..., L, ...]``, of one size on all ranks.
        group: a ProcessGroup, its name or a one-dimensional DeviceMesh; None is the default group.
        dim: the sequence dimension.

    Returns:
        ``[..., world L, ...]``, contiguous.
    """
    _, world = _place(group)
    if not _has_dim(x, dim):
        return refuse(group, f"[exchange] dim must be one of x {list(x.shape)}, but it is {dim}.")
    rows = x.shape[dim]
    index = torch.arange(rows).repeat(world)
    return ops.move_rows(x, index, group_name(group), [rows] * world, [rows] * world, _from_front(x, dim))


def left_halo(x: torch.Tensor, group: Any = None, halo_size: int = 0, dim: int = -2) -> torch.Tensor:
    """The last ``halo_size`` rows of the left neighbour ``(rank - 1) % world``; the backward sends them home.

    Every rank sends as many to its right neighbour, the last one to rank 0, which may ignore them.

    Args:
        x: ``[..., L, ...]`` with L >= halo_size.
        halo_size: rows, the same on all ranks.

    Returns:
        ``[..., halo_size, ...]``, contiguous.
    """
    rank, world = _place(group)
    if not _has_dim(x, dim):
        return refuse(group, f"[exchange] dim must be one of x {list(x.shape)}, but it is {dim}.")
    rows = x.shape[dim]
    if not isinstance(halo_size, int) or not 0 <= halo_size <= rows:
        return refuse(
            group, f"[exchange] halo_size must be an integer from 0 to the {rows} rows of x, not {halo_size}."
        )
    in_splits, out_splits = [0] * world, [0] * world
    in_splits[(rank + 1) % world] = out_splits[(rank - 1) % world] = halo_size
    index = torch.arange(rows - halo_size, rows)
    return ops.move_rows(x, index, group_name(group), in_splits, out_splits, _from_front(x, dim))


def needed_rows(
    x: torch.Tensor,
    group: Any = None,
    in_splits: Sequence[int] = (),
    out_splits: Sequence[int] = (),
    send_index: torch.Tensor | Sequence[int] = (),
    dim: int = -2,
) -> torch.Tensor:
    """All-to-all-v of chosen rows; the backward adds what comes back onto the rows that were sent.

    :meth:`blockcp.Plan.needed_splits` makes the splits and the index with which every rank gets exactly what it needs.

    Args:
        x: ``[..., L, ...]``.
        in_splits: rows for each rank. out_splits: rows from each rank.
        send_index: local rows in the order they are sent, by destination; a row may go to several ranks.

    Returns:
        ``[..., sum(out_splits), ...]`` by source rank, contiguous.
    """
    index = torch.as_tensor(send_index)
    index = index if index.numel() else index.to(torch.int64)
    return ops.move_rows(x, index, group_name(group), list(in_splits), list(out_splits), _from_front(x, dim))


def traffic(group: Any = None) -> tuple[int, int]:
    """Bytes that this rank has sent and received through blockcp in ``group``, without the small agreement records."""
    return ops.group_traffic(group_name(group))


def refuse(group: Any, trouble: str) -> NoReturn:
    """Collective: an error that this rank found in its arguments of an exchange becomes a ValueError on every rank."""
    ops.rows_trouble(group_name(group), trouble)
    raise ValueError(trouble)


def _has_dim(x: torch.Tensor, dim: int) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim()


def _from_front(x: torch.Tensor, dim: int) -> int:
    return dim % x.dim() if -x.dim() <= dim < x.dim() else dim


def _place(group: Any) -> tuple[int, int]:
    if group is None and not dist.is_initialized():
        return 0, 1
    return (
        rank_and_size(None, group)
        if not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group")
        else rank_and_size(group, None)
    )
