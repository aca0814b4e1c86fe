"""Plans: which documents a batch holds, who holds which rows, and how keys and values travel for each mask."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from blockcp._library import ops
from blockcp.arguments import as_int, as_integers, is_number, no_bools, seen
from blockcp.groups import rank_and_size
from blockcp.mask import Mask

EXCHANGES = ("auto", "allgather", "halo", "a2a", "ring")
DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Choice(NamedTuple):
    """How K and V are delivered for one mask, and why that way."""

    path: str
    reason: str


class NeededSplits(NamedTuple):
    """The needed-only all-to-all-v of one rank, as ``blockcp.exchange.needed_rows`` takes it."""

    in_splits: list[int]
    out_splits: list[int]
    send_index: torch.Tensor


class Plan:
    """Made by :func:`blockcp.plan`; not to be changed. Copies are the plan itself; pickling pickles its inputs.

    Attributes:
        world_size, rank: of the context-parallel group.
        batch, rows: of the whole batch after padding; ``given_rows`` before it.
        local_rows: rows of one sequence on one rank, ``rows / world_size``.
        real_rows, documents: counts over the whole batch.
        choice: ``{mask name: Choice(path, reason)}``.
        causal: ``{mask name: bool}``.
        fingerprint: equal on all ranks that hold the same documents, masks and exchange.
        handle: the 0-d int64 tensor that stands for the plan in ``torch.ops.blockcp``.
    """

    def __init__(self, inputs: dict[str, Any]):
        self._inputs = inputs
        self.handle = ops.plan_create(*_request(**inputs))
        facts = json.loads(ops.plan_describe(self.handle))
        masks = facts.pop("masks")
        self.choice = {name: Choice(mask["path"], mask["reason"]) for name, mask in masks.items()}
        self.causal = {name: mask["causal"] for name, mask in masks.items()}
        self.world_size: int = facts["world_size"]
        self.rank: int = facts["rank"]
        self.batch: int = facts["batch"]
        self.rows: int = facts["rows"]
        self.given_rows: int = facts["given_rows"]
        self.local_rows: int = facts["local_rows"]
        self.real_rows: int = facts["real_rows"]
        self.documents: int = facts["documents"]
        self.fingerprint: str = facts["fingerprint"]

    @property
    def doc_ids(self) -> torch.Tensor:
        """``[B, L]`` int64: the document of each local row, counted from 1 in its sequence; 0 is padding."""
        return ops.plan_rows(self.handle, self.rank)[0]

    @property
    def position_ids(self) -> torch.Tensor:
        """``[B, L]`` int64: the position of each local row in its document, for rotary embeddings; 0 for padding."""
        return ops.plan_rows(self.handle, self.rank)[1]

    @property
    def global_doc_ids(self) -> torch.Tensor:
        """``[B, S]``, see :attr:`doc_ids`."""
        return ops.plan_rows(self.handle, -1)[0]

    @property
    def global_position_ids(self) -> torch.Tensor:
        """``[B, S]``, see :attr:`position_ids`."""
        return ops.plan_rows(self.handle, -1)[1]

    def visible(self, mask: str | None = None) -> torch.Tensor:
        """``[B, L, S]`` bool: which rows of the whole sequence each local row sees. Large; for checks."""
        return ops.plan_visible(self.handle, _mask_name(mask), self.rank)

    def kv(self, mask: str | None = None, batch: int = 0) -> dict[str, Any]:
        """Per-rank lists ``recv, send, nreal, s_first, real_end`` of one sequence, and ``use_halo``.

        ``recv``: rows needed from ranks before this one; ``send``: what the next rank needs from before it; ``nreal``:
        rows that are not padding; ``[s_first, real_end)``: the rows of the sequence that the rank needs.
        """
        return json.loads(ops.plan_kv(self.handle, _mask_name(mask), as_int(batch, "[plan] batch")))

    def split_matrix(self, mask: str | None = None) -> list[list[int]]:
        """``matrix[s][r]``: rows held by rank s that rank r needs; the diagonal is what r holds and uses."""
        return json.loads(ops.plan_split_matrix(self.handle, _mask_name(mask)))

    def needed_splits(self, mask: str | None = None, rank: int | None = None) -> NeededSplits:
        """Splits and gather index with which ``blockcp.exchange.needed_rows`` delivers what each rank needs.

        The index counts the local rows of all sequences, ``b * local_rows + row``: ``x`` of ``[B, H, L, D]`` goes in
        as ``x.transpose(1, 2).flatten(0, 1)``, with ``dim=0``.
        """
        rank = self.rank if rank is None else _bounded(rank, "[plan] rank", 0)
        splits = ops.plan_needed_splits(self.handle, _mask_name(mask), rank)
        return NeededSplits(list(splits[0]), list(splits[1]), splits[2])

    def explain(self, **shape: Any) -> str:
        """Paths, reasons, steps, rows, bytes and balance as text; ``q_heads, kv_heads, head_dim, value_dim, dtype``."""
        return ops.plan_explain(self.handle, *_shape(**shape), False)

    def to_json(self, **shape: Any) -> str:
        """As :meth:`explain`, for programs."""
        return ops.plan_explain(self.handle, *_shape(**shape), True)

    def __repr__(self) -> str:
        paths = ", ".join(f"{name}: {choice.path}" for name, choice in self.choice.items())
        documents = f"{self.documents} document{'' if self.documents == 1 else 's'}"
        rows = f"{self.batch} x {self.rows} row{'' if self.rows == 1 else 's'}"
        return f"Plan(rank {self.rank} of {self.world_size}, {documents} in {rows}, {paths})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self._inputs,)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self


def plan(
    *,
    doc_ids: Any = None,
    lengths: Any = None,
    rows: int | None = None,
    cu_seqlens: Any = None,
    position_ids: Any = None,
    padding_mask: Any = None,
    world_size: int | None = None,
    rank: int | None = None,
    group: Any = None,
    mesh: Any = None,
    masks: Mapping[str, Mask] | Mask | None = None,
    exchange: str | Mapping[str, str] = "auto",
    layout: str = "contiguous",
    pad: bool = False,
) -> Plan:
    """Plans the attention of one batch. Pure: needs no group, and equal inputs give equal plans on every rank.

    The documents come in exactly one of four ways; tensors of any integer type and device, arrays, and lists of
    integers, tensors or arrays:

    Args:
        doc_ids: ``[S]`` or ``[B, S]``: equal neighbours are one document, 0 is padding. bool: True rows are one.
        lengths: of the documents in order, ``[n]``, or a list of such lists, one a sequence; ``rows`` pads the end.
        cu_seqlens: ``[n + 1]`` cumulative lengths of one sequence, from 0; ``rows`` pads the end.
        position_ids: ``[S]`` or ``[B, S]``: a document starts where a position is not its left neighbour's plus one;
            with ``padding_mask`` of the same shape, True where there is padding.
        world_size, rank: of the context-parallel group; or ``group``, or ``mesh`` (a one-dimensional DeviceMesh).
            With none of them the default group, or one rank where there is none.
        masks: ``{name: Mask}``; default one causal mask called "full".
        exchange: "auto", "allgather", "halo", "a2a" or "ring": one for all masks or one a mask. An explicit path that
            cannot run is refused; only "auto" chooses.
        layout: "contiguous": rank r holds rows ``[r L, (r + 1) L)``.
        pad: add padding at the end until ``world_size`` divides the rows, which is refused otherwise.

    Raises:
        ValueError: for anything above that cannot be meant, naming the row and the values.
    """
    if not isinstance(layout, str) or layout != "contiguous":
        hint = " The balanced layout does not exist yet." if layout == "balanced" else ""
        raise ValueError(f'[plan] layout must be "contiguous", but it is {seen(layout)}.{hint}')
    given = {"doc_ids": doc_ids, "lengths": lengths, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            f"[plan] the documents must be given in one way of {', '.join(given)}, but {' and '.join(names) or 'none'} "
            "was given."
        )
    if padding_mask is not None and position_ids is None:
        raise ValueError("[plan] padding_mask must come with position_ids; otherwise mark padding as doc_ids 0.")
    if rows is not None and names[0] not in ("lengths", "cu_seqlens"):
        raise ValueError(f"[plan] rows must come with lengths or cu_seqlens, but {names[0]} was given.")
    if not isinstance(pad, bool):
        raise ValueError(f"[plan] pad must be True or False, but it is {seen(pad)}.")
    rank, world_size = _place(rank, world_size, group, mesh)
    masks = _named(masks)
    return Plan(
        {
            "source": names[0],
            "documents": _documents(names[0], given[names[0]]),
            "padding_mask": None if padding_mask is None else as_integers(padding_mask, "[plan] padding_mask"),
            "rows": -1 if rows is None else _bounded(rows, "[plan] rows", 0),
            "world_size": world_size,
            "rank": rank,
            "masks": masks,
            "exchange": _paths(exchange, masks),
            "pad": pad,
        }
    )


def _place(rank: int | None, world_size: int | None, group: Any, mesh: Any) -> tuple[int, int]:
    if group is not None or mesh is not None:
        if rank is not None or world_size is not None:
            raise ValueError("[plan] world_size= and rank= or group= or mesh= must be given, but not both.")
        return rank_and_size(group, mesh)
    if world_size is None and rank is None:
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        return rank_and_size(None, None) if initialized else (0, 1)
    if world_size is None or (rank is None and as_int(world_size, "[plan] world_size") != 1):
        raise ValueError(
            f"[plan] world_size and rank must both be given, but they are {seen(world_size)} and {seen(rank)}."
        )
    rank = 0 if rank is None else _bounded(rank, "[plan] rank", 0)
    return rank, _bounded(world_size, "[plan] world_size", 1)


def _bounded(value: Any, what: str, least: int) -> int:
    number = as_int(value, what)
    if not least <= number < 2**31:
        raise ValueError(f"{what} must be at least {least} and less than 2^31, but it is {number}.")
    return number


def _documents(source: str, value: Any) -> Any:
    """A copy that later changes of the caller's numbers do not reach; lengths as one tensor a sequence."""
    if source == "lengths":
        return [no_bools(part, "[plan] lengths") for part in _lengths(value)]
    numbers = as_integers(value, f"[plan] {source}")
    return numbers if source == "doc_ids" else no_bools(numbers, f"[plan] {source}")


def _lengths(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Sequence) and not isinstance(value, str) and not all(map(is_number, value)):
        parts = [as_integers(part, f"[plan] lengths[{i}]") for i, part in enumerate(value)]
        for i, part in enumerate(parts):
            if part.dim() != 1:
                raise ValueError(
                    "[plan] lengths must be numbers, or a list of numbers for each sequence, but lengths"
                    f"[{i}] is {seen(value[i])}."
                )
        return parts
    whole = as_integers(value, "[plan] lengths")
    if whole.dim() not in (1, 2):
        raise ValueError(f"[plan] lengths must have the shape [n] or [B, n], but it is {list(whole.shape)}.")
    return [whole] if whole.dim() == 1 else list(whole)


def _named(masks: Mapping[str, Mask] | Mask | None) -> dict[str, Mask]:
    if masks is None:
        return {"full": Mask()}
    if isinstance(masks, Mask):
        return {"full": masks}
    if not isinstance(masks, Mapping):
        raise ValueError(f"[plan] masks must be {{name: blockcp.Mask}}, but it is {seen(masks)}.")
    for name, mask in masks.items():
        if not isinstance(mask, Mask):
            raise ValueError(f"[plan] masks must be {{name: blockcp.Mask}}, but {seen(name)} is {seen(mask)}.")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ValueError(f"[plan] the name of a mask must be printable text, but it is {seen(name)}.")
    if not masks:
        raise ValueError("[plan] masks must name at least one mask, but it is empty.")
    return dict(masks)


def _request(
    source: str,
    documents: Any,
    padding_mask: Any,
    rows: int,
    world_size: int,
    rank: int,
    masks: dict[str, Mask],
    exchange: dict[str, str],
    pad: bool,
) -> tuple[list[torch.Tensor], str]:
    """Tensors and JSON for ``torch.ops.blockcp.plan_create``; see blockcp/torch/plans.h."""
    request: dict[str, Any] = {"world": world_size, "rank": rank, "pad": pad, "rows": rows, "masks": {}}
    request["exchange"] = exchange
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    if source == "lengths":
        request["counts"] = [len(sequence) for sequence in documents]
        request["lengths"] = add(torch.cat(documents) if documents else torch.zeros(0, dtype=torch.int64))
    else:
        request[{"doc_ids": "ids", "position_ids": "positions"}.get(source, source)] = add(documents)
    if padding_mask is not None:
        request["padding"] = add(padding_mask)
    for name, mask in masks.items():
        entry = {"causal": mask.causal, "window": mask.window, "span_window": mask.span_window}
        if mask.spans is not None:
            entry["spans"] = add(mask.spans)
        request["masks"][name] = entry
    return tensors, json.dumps(request)


def _paths(exchange: Any, masks: dict[str, Mask]) -> dict[str, str]:
    """The explicit ones by mask."""
    if not isinstance(exchange, (str, Mapping)):
        raise ValueError(f"[plan] exchange must be a path's name or {{mask: path}}, but it is {seen(exchange)}.")
    paths = dict(exchange) if isinstance(exchange, Mapping) else dict.fromkeys(masks, exchange)
    unknown = [name for name in paths if name not in masks]
    if unknown:
        raise ValueError(f"[plan] exchange must name masks of this plan, {list(masks)}, but it names {seen(unknown)}.")
    for path in paths.values():
        if not isinstance(path, str) or path not in EXCHANGES:
            raise ValueError(f"[plan] exchange must be one of {', '.join(EXCHANGES)}, but it is {seen(path)}.")
    return {name: path for name, path in paths.items() if path != "auto"}


def _mask_name(mask: Any) -> str:
    if mask is not None and (not isinstance(mask, str) or not mask.isprintable()):
        raise ValueError(f"[plan] mask must be the name of a mask or None, but it is {seen(mask)}.")
    return mask or ""


def _shape(
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int, int, int, str]:
    given = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    given["value_dim"] = head_dim if value_dim is None else value_dim
    q_heads, kv_heads, head_dim, value_dim = (_bounded(number, f"[plan] {what}", 1) for what, number in given.items())
    if q_heads % kv_heads:
        raise ValueError(f"[plan] kv_heads must divide q_heads, but they are {kv_heads} and {q_heads}.")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"[plan] dtype must be one of {list(DTYPES)}, but it is {seen(dtype)}.")
    return q_heads, kv_heads, head_dim, value_dim, DTYPES[dtype]
