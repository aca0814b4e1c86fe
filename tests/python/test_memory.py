"""How much memory attention takes beyond its inputs and its results, from the peak of a process of its own.

The peak (VmHWM) is set back before each pass and compared with what is resident then: q, k, v and dout, in backward out
and lse too. What a pass must hand over is not counted: out and lse in forward, dq, dk and dv in backward. All else is:
keys and values from other ranks and their gradients, accumulators, packed keys, the transport's buffers.
"""

import pathlib

import pytest
import torch
from ranks import run_ranks

import blockcp

pytestmark = pytest.mark.dist

MIB = 2**20
HEADS = (8, 2)


def status(name):
    """A field of /proc/self/status in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def extra(call):
    """What ``call`` returns, and the peak in bytes of what it held beyond that. Code that it is the first to run does
    not count: pages of files, which stay."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, files = status("VmRSS"), status("RssFile")
    results = call()
    peak = status("VmHWM") - (status("RssFile") - files)
    return results, peak - before - sum(x.nbytes for x in results)


def passes(attend, shapes, dtype):
    """Extra bytes of forward and backward; ``attend(q, k, v)`` gives (out, ...)."""
    q, k, v, dout = (torch.empty(shape, dtype=dtype).normal_() for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results, forward = extra(lambda: attend(*leaves))
    _, backward = extra(lambda: torch.autograd.grad(results[0], leaves, dout))
    return forward, backward


def with_plan(lengths, world=1, rank=0):
    plan = blockcp.plan(lengths=lengths, world_size=world, rank=rank)
    return lambda q, k, v: blockcp.attention(q, k, v, plan, return_lse=True)


def packed(lengths):
    """The kernel alone."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return lambda q, k, v: blockcp.varlen(q, k, v, offsets, offsets, causal=True, return_lse=True)


def with_math(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),)


def measured(rank, world, way, lengths, dim, dtype, threads):
    torch.set_num_threads(threads)
    make = {"plan": lambda n: with_plan(n, world, rank), "packed": packed, "math": lambda _: with_math}[way]
    for documents in ([4 * world], lengths):  # the first starts threads and connections
        rows = sum(documents) // world
        heads = (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
        shapes = [(rows, h, dim) if way == "packed" else (1, h, rows, dim) for h in heads]
        seen = passes(make(documents), shapes, dtype)
    return seen


# Nothing is left out of the count: fp32 accumulators of 16-bit gradients count too, dq's for the KV heads in work.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_PM_01_extra_memory_is_a_fraction_of_a_score_matrix(world, dtype):
    rows = 4096
    limit = 0.25 * HEADS[0] * (rows // world) * rows * 4
    for forward, backward in run_ranks(world, measured, "plan", [rows], 512, dtype, 1, fresh=True):
        print(f"{forward / MIB:.1f} and {backward / MIB:.1f} of {limit / MIB:.0f} MiB")
        assert forward < limit
        assert backward < limit


def test_PM_01_the_measure_sees_a_score_matrix():
    rows = 4096
    matrix = HEADS[0] * rows * rows * 4
    for used in run_ranks(1, measured, "math", [rows], 64, torch.float32, 1, fresh=True)[0]:
        assert used > matrix


# Beyond delta, 4 bytes a row and head: key panels of the documents in work (1024 rows of K and V of one or two KV heads
# are 1 or 2 MiB a thread), or in 16-bit types their dq in fp32 (2 MiB for each of up to 2 threads - 1 KV heads), tiles
# of a block of queries, and stacks. Where the kernel kept anything for all rows, even in 16 bits for a single KV head's
# K and V, the second 8192 rows would add 4 MiB. Results end inside huge pages, which is up to 2 MiB more or less.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_scratch_does_not_grow_with_the_rows(threads, dtype):
    dim, seen = 128, []
    for documents in (8, 16):
        rows = 1024 * documents
        ((forward, backward),) = run_ranks(1, measured, "packed", [1024] * documents, dim, dtype, threads, fresh=True)
        seen.append((forward, backward - 4 * HEADS[0] * rows))
    print([[f"{x / MIB:.1f} MiB" for x in of_rows] for of_rows in seen])
    for short, long in zip(*seen):
        assert long < short + 3 * MIB
        assert long < 4 * MIB * threads
