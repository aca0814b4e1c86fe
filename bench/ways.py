"""Ways to attend over packed documents, ours and torch's: functions of q [1, Hq, S, D], k and v [1, Hkv, S, D] that
return [1, Hq, S, D]. Plans and masks are made before, so they cost no time."""

import dataclasses
import functools
import os
from collections.abc import Callable

import packings
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import blockcp

OURS = "blockcp"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_compiled = set()  # what FlexAttention has been compiled for


def three(problem):
    """Heads of q, k and v."""
    q_heads, kv_heads = problem.heads
    return q_heads, kv_heads, kv_heads


@dataclasses.dataclass
class Way:
    name: str
    attend: Callable
    has_backward: bool = True


def ours(problem, rows):
    documents = packings.lengths(problem.packing, rows)
    masks = {problem.mask: blockcp.Mask(window=problem.window)}
    plan = blockcp.plan(lengths=documents, rows=rows, masks=masks, world_size=1, rank=0)
    return Way(OURS, lambda q, k, v: blockcp.attention(q, k, v, plan))


def band(rows, window):
    """[rows, rows], true where one document's row sees a key."""
    row = torch.arange(rows)
    seen = row[:, None] >= row
    return seen & (row[:, None] - row < window) if window else seen


def loop(problem, rows):
    """SDPA per document. A window that cuts into a document needs a mask there; elsewhere it is causal attention."""
    documents = packings.lengths(problem.packing, rows)
    window = problem.window or rows
    masks = {n: band(n, window) for n in set(documents) if n > window}

    def one(n, q, k, v):
        mask = masks.get(n)
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)

    def attend(q, k, v):
        # split, whose backward is one concatenation; that of slices adds up a tensor of all rows per document.
        parts = zip(documents, *(t.split(documents, dim=2) for t in (q, k, v)))
        return torch.cat([one(*part) for part in parts], dim=2)

    return Way("SDPA per document", attend)


def masked(problem, rows):
    """One SDPA with a mask of all rows by all rows. None where the loop does the same, or where it would take a quarter
    of the memory or more."""
    item = 4 if problem.dtype == "fp32" else 2
    if rows * rows * (1 + item) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4:
        return None  # SDPA converts the mask to the type of q
    documents = packings.lengths(problem.packing, rows)
    if documents == [rows]:
        return None
    mask = torch.block_diag(*(band(n, problem.window) for n in documents))
    return Way(
        "SDPA with mask", lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    )


@functools.cache
def compiled_flex():
    # Each width, type and mask is compiled for itself: sizes that vary would make slower code.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache(maxsize=2)
def block_mask(packing, rows, window):
    documents = torch.tensor(packings.lengths(packing, rows))
    document = torch.repeat_interleave(torch.arange(len(documents)), documents)

    def causal(batch, head, row, key):
        return (document[row] == document[key]) & (row >= key)

    def windowed(batch, head, row, key):
        return causal(batch, head, row, key) & (row - key < window)

    return create_block_mask(windowed if window else causal, 1, None, rows, rows, device="cpu")


def flex(problem, rows):
    """Compiled FlexAttention; on the CPU it has no backward."""
    mask, attend = block_mask(problem.packing, rows, problem.window), compiled_flex()

    @torch.no_grad()
    def forward(q, k, v):
        return attend(q.detach(), k.detach(), v.detach(), block_mask=mask, enable_gqa=True)

    # Compiles, unless another packing did before.
    kind = (problem.heads, rows, problem.dim, problem.dtype, problem.window)
    if kind not in _compiled:
        forward(*(torch.zeros(1, heads, rows, problem.dim, dtype=TYPES[problem.dtype]) for heads in three(problem)))
        _compiled.add(kind)
    return Way("FlexAttention", forward, has_backward=False)


PEERS = {"loop": loop, "flex": flex, "mask": masked}
