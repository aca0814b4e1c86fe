"""Three differentiable collectives along a sequence dimension, on their own.

All of them are collective: every rank of the group calls them in the same order, in the backward too. Ranks compare
dtype, shape, dim, requires_grad and splits before anything is sent; a difference, or an argument on one rank that no
call could take, is a ValueError on every rank. Gradients that meet are summed in fp32 (fp64 for fp64) by ascending rank
and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from blockcp._library import ops
from blockcp.arguments import as_int, as_integers, check_tensors, no_bools, seen, trouble_of
from blockcp.groups import group_name, rank_and_size

# Which local rows are sent, how many to every rank, and how many come from every rank.
Moves = tuple[torch.Tensor, list[int], list[int]]


def all_gather(x: torch.Tensor, group: Any = None, dim: int = -2) -> torch.Tensor:
    """Every rank's ``x`` along ``dim``, in rank order; the backward is a reduce-scatter that sums.

    Args:
        x: ``[..., L, ...]``, of one size on all ranks.
        group: a ProcessGroup, its name or a one-dimensional DeviceMesh; None is the default group.
        dim: the sequence dimension.

    Returns:
        ``[..., world L, ...]``, contiguous.
    """
    place = place_in(group)

    def moves(rows: int) -> Moves:
        return torch.arange(rows, device="cpu").repeat(place.world), [rows] * place.world, [rows] * place.world

    return _move(x, place, dim, moves)


def left_halo(x: torch.Tensor, group: Any = None, halo_size: int = 0, dim: int = -2) -> torch.Tensor:
    """The last ``halo_size`` rows of the left neighbour ``(rank - 1) % world``; the backward sends them home.

    Every rank sends as many to its right neighbour, the last one to rank 0, which may ignore them.

    Args:
        x: ``[..., L, ...]`` with L >= halo_size.
        halo_size: rows, the same on all ranks.

    Returns:
        ``[..., halo_size, ...]``, contiguous.
    """
    place = place_in(group)

    def moves(rows: int) -> Moves:
        size = as_int(halo_size, "[exchange] halo_size")
        if not 0 <= size <= rows:
            raise ValueError(f"[exchange] halo_size must be from 0 to the {rows} rows of x, but it is {size}.")
        in_splits, out_splits = [0] * place.world, [0] * place.world
        in_splits[(place.rank + 1) % place.world] = out_splits[(place.rank - 1) % place.world] = size
        return torch.arange(rows - size, rows, device="cpu"), in_splits, out_splits

    return _move(x, place, dim, moves)


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
    It counts the rows of all sequences: ``x`` of ``[B, H, L, D]`` goes in as ``x.transpose(1, 2).flatten(0, 1)``, with
    ``dim=0``.

    Args:
        x: ``[..., L, ...]``.
        in_splits: rows for each rank. out_splits: rows from each rank.
        send_index: local rows in the order they are sent, by destination; a row may go to several ranks.

    Returns:
        ``[..., sum(out_splits), ...]`` by source rank, contiguous.
    """
    place = place_in(group)

    def moves(rows: int) -> Moves:
        index = no_bools(as_integers(send_index, "[exchange] send_index"), "[exchange] send_index")
        return index, _splits(in_splits, "in_splits"), _splits(out_splits, "out_splits")

    return _move(x, place, dim, moves)


def traffic(group: Any = None) -> tuple[int, int]:
    """Bytes that this rank has sent and received through blockcp in ``group``, without the small agreement records."""
    return ops.group_traffic(group_name(group))


def refuse(group: Any, trouble: str) -> NoReturn:
    """Collective: an error that this rank found in its arguments of an exchange becomes a ValueError on every rank."""
    nothing = torch.empty(0, device="cpu")
    ops.move_rows(nothing, nothing, group_name(group), [], [], 0, trouble=trouble)
    raise ValueError(trouble)


class Place(NamedTuple):
    """Where this rank is: the group's name, empty for one rank without a group."""

    name: str
    rank: int
    world: int


def place_in(group: Any, world_size: int | None = None) -> Place:
    """This rank in ``group``; ``world_size`` of the plan, where there is one, as for :func:`group_name`."""
    name = group_name(group, world_size)
    if not name:
        return Place(name, 0, 1)
    is_mesh = not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group")
    return Place(name, *(rank_and_size(None, group) if is_mesh else rank_and_size(group, None)))


def _move(x: torch.Tensor, place: Place, dim: int, moves: Callable[[int], Moves]) -> torch.Tensor:
    """The op. An error here, or of ``moves(rows along dim)``, is raised on every rank."""
    try:
        check_tensors("exchange", place.world, x=x)
        dim = as_int(dim, "[exchange] dim")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"[exchange] dim must be one of x {list(x.shape)}, but it is {dim}.")
        dim %= x.dim()
        index, in_splits, out_splits = moves(x.shape[dim])
    except Exception as error:
        refuse(place.name, trouble_of(error, "exchange"))
    return ops.move_rows(x, index, place.name, in_splits, out_splits, dim)


def _splits(splits: Any, name: str) -> list[int]:
    try:
        rows = [as_int(number, f"[exchange] a number in {name}") for number in splits]
    except (TypeError, RuntimeError):
        raise ValueError(f"[exchange] {name} must be integers, one a rank, but it is {seen(splits)}.") from None
    if not all(0 <= number < 2**31 for number in rows):
        raise ValueError(f"[exchange] {name} must be from 0 to 2^31 - 1, but they are {seen(rows)}.")
    return rows
