"""What the plan of one packed sequence says about each mask: path, reason, rows received, work."""

import collections
import dataclasses
import json

import blockcp


@dataclasses.dataclass
class MaskFacts:
    name: str
    path: str
    reason: str
    received: list  # rows of K/V in one forward, by rank
    gathered: list  # the same, if all-gather delivered them
    work: list  # visible (query, key) pairs, by rank
    balance: float  # largest work over mean work


def of_masks(lengths, rows, ranks, masks):
    plan = blockcp.plan(lengths=lengths, rows=rows, world_size=ranks, rank=0, masks=masks)
    return [of_mask(name, mask) for name, mask in json.loads(plan.to_json())["masks"].items()]


def of_mask(name, mask):
    received = {path["path"]: path["rows_received"] for path in mask["paths"] if path["admitted"]}
    return MaskFacts(
        name=name,
        path=mask["path"],
        reason=mask["reason"],
        received=received[mask["path"]],
        gathered=received["allgather"],
        work=mask["work"],
        balance=mask["balance"],
    )


def table(masks):
    lines = ["mask   path       rows received by each rank      all-gather  work, largest / mean"]
    for mask in masks:
        rows = " ".join(f"{count:5}" for count in mask.received)
        share = sum(mask.received) / max(1, sum(mask.gathered))
        lines.append(f"{mask.name:6} {mask.path:9} {rows:30} {max(mask.gathered):12}  {mask.balance:.2f}")
        lines.append(f"       because: {mask.reason}; {share:.0%} of the rows of all-gather")
    return "\n".join(lines)


def summary(packs, rows, ranks, masks):
    """The same over all packed sequences, a line for each mask."""
    every = [of_masks([len(text) for text in pack], rows, ranks, masks) for pack in packs]
    lines = [f"over all {len(packs)} packed sequences:"]
    for one in zip(*every):
        paths = collections.Counter(mask.path for mask in one)
        rows_received, gathered = (sum(map(sum, lists)) for lists in zip(*((m.received, m.gathered) for m in one)))
        names = ", ".join(f"{path} {times} times" for path, times in paths.most_common())
        lines.append(f"  {one[0].name:6} {names}; {rows_received} rows received, all-gather {gathered}")
    return "\n".join(lines)
