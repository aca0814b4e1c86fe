"""Process groups by name, as the ops want them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from blockcp.arguments import seen


def group_name(group: Any, world_size: int | None = None) -> str:
    """The name under which torch knows ``group``.

    Args:
        group: a ProcessGroup, its name, a one-dimensional DeviceMesh, or None: the default group, or none at all where
            ``world_size`` is 1.
        world_size: of the plan, where there is one.
    """
    if isinstance(group, str):
        return group
    if group is None:
        if world_size == 1:
            return ""
        if not dist.is_available() or not dist.is_initialized():
            if world_size is None:
                return ""
            raise ValueError(
                f"[torch] a plan for {world_size} ranks needs a process group, but group is None and torch.distributed "
                "is not initialized. Call torch.distributed.init_process_group() first."
            )
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group"):
        group = group.get_group()
    if not hasattr(group, "group_name"):
        raise ValueError(
            "[torch] group must be a process group that this rank is in, its name, a one-dimensional DeviceMesh or "
            f"None, but it is {group!r}. Was it made by new_group for other ranks?"
        )
    return group.group_name


def rank_and_size(group: Any, mesh: Any) -> tuple[int, int]:
    """Rank and size within ``group``, or within the one-dimensional DeviceMesh ``mesh``."""
    if mesh is not None:
        if group is not None:
            raise ValueError("[plan] group= or mesh= must be given, but both are. Leave one out.")
        group = _group_of(mesh)
    try:
        found = _named_group(group) if isinstance(group, str) else group
        rank, world = dist.get_rank(found), dist.get_world_size(found)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        hint = "" if dist.is_initialized() else " Call torch.distributed.init_process_group() first."
        raise ValueError(
            f"[plan] group must be a process group of this process or its name, but it is {seen(group)}.{hint}"
        ) from None
    if rank < 0:
        raise ValueError("[plan] group must be one that this rank is in, but it is not. Give its rank and world_size.")
    return rank, world


def _named_group(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def _group_of(mesh: Any) -> Any:
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise ValueError(f"[plan] mesh must be a DeviceMesh, but it is {seen(mesh)}.")
    if mesh.ndim != 1:
        raise ValueError(
            f"[plan] mesh must have one dimension, but it has {mesh.ndim} {mesh.mesh_dim_names}. Take the "
            'context-parallel one: mesh["cp"].'
        )
    return mesh.get_group()
