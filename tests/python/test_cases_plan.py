"""Reported cases about documents and plans, by id."""

import itertools
import math
import time

import numpy
import pytest
import torch
from probe import expect, expect_oracle, ids_of, numbers, on_all_paths
from ranks import run_ranks, same_error
from torch.utils._python_dispatch import TorchDispatchMode

import blockcp

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("length", range(1, 9))
def test_PL_02_odd_length_keeps_its_last_key(length):
    ids = ids_of([length], 8 - length)
    results = on_all_paths(2, ids, values=[1, 1, 1, 1, 2, 2, 2, 9])
    if length == 7:
        expect(results, "1 1 1 1 | 1.2 1.333333 1.428571 0", pads=[7])
    expect_oracle(on_all_paths(2, ids), ids, pads=range(length, 8))


def poison():
    """Memory that was freed full of NaN is likely what the next allocations get."""
    for size in (1000, 10000, 100000, 1000000):
        torch.full((size,), math.nan)


def twice(rank, world, ids):
    runs = []
    for _ in range(2):
        poison()
        plan = blockcp.plan(doc_ids=ids, world_size=world, rank=rank)
        v = (torch.arange(plan.local_rows) + rank * plan.local_rows).float().reshape(1, 1, -1, 1)
        v = v.expand(1, 2, -1, 16).clone().requires_grad_()
        q, k = torch.zeros(1, 4, plan.local_rows, 16), torch.zeros(1, 2, plan.local_rows, 16)
        out = blockcp.attention(q, k, v, plan)
        out.sum().backward()
        runs.append((out.detach(), v.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    return runs[0]


@pytest.mark.parametrize("real", [*range(697, 704), 698])
def test_PL_03_padded_tail_is_not_a_document(real):
    parts = run_ranks(4, twice, ids_of([real], 704 - real))
    out = torch.cat([part[0] for part in parts], 2)[0, 0, :, 0]
    rows = torch.arange(704.0)
    torch.testing.assert_close(out, torch.where(rows < real, rows / 2, 0.0), rtol=1e-5, atol=1e-4)
    assert (out[real:] == 0).all()


def test_PL_03_small_twin():
    ids = ids_of([13], 3)
    results = on_all_paths(4, ids)
    expect_oracle(results, ids, pads=range(13, 16))
    for out, _, _, _, dv in results.values():
        assert out[0, 0, 12, 0].item() == pytest.approx(6.0)
        assert dv[0, 0, 12, 0].item() == pytest.approx(2 * 0.076923, abs=1e-5)


@pytest.mark.parametrize("lengths,pad,world", [([3], 13, 4), ([], 8, 2)])
def test_PL_04_ranks_of_padding_take_part(lengths, pad, world):
    ids = ids_of(lengths, pad)
    results = on_all_paths(world, ids)
    assert len(results) == 4
    expect_oracle(results, ids, pads=range(sum(lengths), len(ids)))


def test_PL_05_local_counts_are_not_global_offsets():
    for rank in range(2):
        plan = blockcp.plan(lengths=[2048], world_size=2, rank=rank)
        kv = plan.kv()
        assert kv["nreal"] == [1024, 1024] and kv["s_first"] == [0, 0] and kv["real_end"] == [1024, 2048]
        assert plan.position_ids[0, [0, -1]].tolist() == [1024 * rank, 1024 * rank + 1023]
        kv = blockcp.plan(lengths=[1000, 1048], world_size=2, rank=rank).kv()
        assert kv["nreal"] == [1024, 1024] and kv["s_first"] == [0, 1000] and kv["recv"] == [0, 24]


def one_token_documents(rank, world):
    plan = blockcp.plan(lengths=[1] * 70000, world_size=world, rank=rank)
    q, k, v = (torch.randn(1, 1, plan.local_rows, 8) for _ in range(3))
    return plan.documents, torch.equal(blockcp.attention(q, k, v, plan), v)


def test_PL_09_padding_is_no_documents_and_70000_documents_work():
    assert blockcp.plan(doc_ids=ids_of([100], 70000), world_size=2, rank=0).documents == 1
    assert run_ranks(2, one_token_documents) == [(70000, True)] * 2


def test_PL_11_rows_of_a_batch_have_their_own_borders():
    ids = [[1] * 8, [1, 1, 1, 2, 2, 2, 2, 2]]
    results = on_all_paths(2, ids)
    expect(results, "0 .5 1 1.5 | 2 2.5 3 3.5", batch=0)
    expect(results, "0 .5 1 3 | 3.5 4 4.5 5", batch=1)


def test_PL_14_documents_shorter_than_the_ranks():
    results = on_all_paths(4, [1, 1, 1, 1])
    assert set(results) == {"allgather", "a2a", "ring"}
    expect(results, "0 | .5 | 1 | 1.5")
    plan = blockcp.plan(lengths=[4], world_size=4, rank=0)
    assert plan.split_matrix() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    with pytest.raises(ValueError, match="halo"):
        blockcp.plan(lengths=[4], world_size=4, rank=0, exchange="halo")
    for ids, world in (([1, 1, 0, 0], 4), ([1], 1)):
        expect_oracle(on_all_paths(world, ids), ids, pads=[i for i, x in enumerate(ids) if x == 0])


def undivided(rank, world):
    blockcp.plan(lengths=[10], world_size=world, rank=rank)


def shard_and_back(rank, world):
    plan = blockcp.plan(lengths=[10], world_size=world, rank=rank, pad=True)
    x = torch.arange(10).reshape(1, 10)
    part = blockcp.shard({"input_ids": x}, plan)["input_ids"]
    return plan.rows, part.tolist(), blockcp.unshard(part, plan).tolist()


def test_PL_15_lengths_that_do_not_divide():
    message = same_error(4, undivided)
    assert "10" in message and "4" in message
    parts = run_ranks(4, shard_and_back)
    assert all(rows == 12 and back == [list(range(10))] for rows, _, back in parts)
    assert [row for _, part, _ in parts for row in part[0]] == [*range(10), 0, 0]


def test_PL_16_left_padding():
    ids = [0, 0, 0, 1, 1, 1, 1, 1]
    results = on_all_paths(2, ids)
    expect(results, "0 0 0 3 | 3.5 4 4.5 5", "0 0 0 2.283333 | 1.283333 .783333 .45 .2", pads=[0, 1, 2])


@pytest.mark.parametrize("offsets", [[0, 3, 8, 8, 8, 8], [0, 3, 3, 8], [0, 0, 3, 8]])
def test_PL_17_documents_of_no_rows_are_dropped(offsets):
    plain = blockcp.plan(cu_seqlens=[0, 3, 8], world_size=2, rank=1)
    plan = blockcp.plan(cu_seqlens=torch.tensor(offsets, dtype=torch.int32), world_size=2, rank=1)
    assert plan.fingerprint == plain.fingerprint and plan.documents == 2
    assert plan.split_matrix() == plain.split_matrix()
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    assert blockcp.plan(lengths=lengths, world_size=2, rank=1).fingerprint == plain.fingerprint


def test_PL_18_the_window_is_cut_at_the_document():
    ids = ids_of([5, 11])
    results = on_all_paths(4, ids, {"window": 4})
    assert "halo" in results
    expect(results, "0 .5 1 1.5 | 2.5 5 5.5 6 | 6.5 7.5 8.5 9.5 | 10.5 11.5 12.5 13.5")
    plan = blockcp.plan(doc_ids=ids, world_size=4, rank=0, masks={"local": blockcp.Mask(window=4)})
    assert plan.kv("local")["recv"] == [0, 3, 3, 3]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8])
def test_DT_03_any_integer_type(kind):
    ids = ids_of([3, 4], 1)
    plan = blockcp.plan(doc_ids=torch.tensor(ids, dtype=kind), world_size=2, rank=0)
    assert plan.fingerprint == blockcp.plan(doc_ids=ids, world_size=2, rank=0).fingerprint


def test_DT_03_other_inputs():
    ids = ids_of([3, 4], 1)
    wanted = blockcp.plan(doc_ids=ids, world_size=2, rank=0).fingerprint
    huge = [2**40 if i == 1 else i for i in ids]
    for given in (
        numpy.array(ids, numpy.int32),
        torch.tensor([ids]),
        huge,
        torch.tensor(ids).repeat_interleave(2)[::2],
    ):
        assert blockcp.plan(doc_ids=given, world_size=2, rank=0).fingerprint == wanted
    assert blockcp.plan(doc_ids=torch.tensor([True, True, False, False])).documents == 1
    for bad, seen in (([1.5, 2.0], "1.5"), ([1, -7], "-7"), ([1.0, 1.0], "1"), ([True, False, True], "row 2")):
        with pytest.raises(ValueError, match=seen):
            blockcp.plan(doc_ids=bad)
    with pytest.raises(ValueError, match=r"\[1, 1, 2\]"):
        blockcp.plan(doc_ids=torch.ones(1, 1, 2, dtype=torch.int64))


def test_VA_04_numbers_of_any_kind():
    wanted = blockcp.plan(lengths=[8], world_size=2, rank=1, masks={"m": blockcp.Mask(window=3)}).fingerprint
    for three in (torch.tensor(3), numpy.int64(3), torch.tensor(3, dtype=torch.int16)):
        mask = blockcp.Mask(window=three)
        assert type(mask.window) is int
        assert blockcp.plan(lengths=[8], world_size=2, rank=1, masks={"m": mask}).fingerprint == wanted
    assert blockcp.Mask(window=(numpy.int32(2), torch.tensor(0))).window == (2, 0)
    for kind in (int, numpy.int64, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int16)):
        plan = blockcp.plan(lengths=torch.tensor([6]), rows=kind(8), world_size=kind(2), rank=kind(1))
        assert (plan.rows, plan.local_rows, plan.rank) == (8, 4, 1) and type(plan.local_rows) is int
    bads = (2.5, "3", True, torch.tensor([1]), torch.tensor(2.0))
    for bad in (*bads, (1, 2, 3)):
        with pytest.raises(ValueError, match="window"):
            blockcp.Mask(window=bad)
    for bad in bads:
        with pytest.raises(ValueError, match=r"\[plan\] rows must be an integer"):
            blockcp.plan(lengths=[2], rows=bad)
    plan = blockcp.plan(lengths=[4])
    q = torch.randn(1, 1, 4, 4)
    wanted = blockcp.attention(q, q, q, plan, scale=0.5)
    for half in (numpy.float32(0.5), torch.tensor(0.5)):
        assert torch.equal(blockcp.attention(q, q, q, plan, scale=half), wanted)


def test_VA_04_maxima_of_any_kind():
    x = torch.randn(5, 1, 8)
    wanted = blockcp.varlen(x, x, x, [0, 2, 5], [0, 2, 5])
    for three in (3, numpy.int64(3), numpy.int16(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        assert torch.equal(blockcp.varlen(x, x, x, [0, 2, 5], [0, 2, 5], three, max_seqlen_k=three), wanted)
    for bad in (3.0, "3", True, torch.tensor([3]), torch.tensor(3.0)):
        for name in ("max_seqlen_q", "max_seqlen_k"):
            with pytest.raises(ValueError, match=rf"\[varlen\] {name} must be an integer"):
                blockcp.varlen(x, x, x, [0, 2, 5], [0, 2, 5], **{name: bad})


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def ids_of_equal_documents(documents):
    return torch.arange(131072) // (131072 // documents) + 1


def planning_ops(documents, world):
    with Counting() as count:
        plan = blockcp.plan(doc_ids=ids_of_equal_documents(documents), world_size=world, rank=world - 1)
    assert plan.documents == documents
    return count.calls


def test_PM_07_tensor_ops_of_planning_do_not_grow():
    assert len({planning_ops(documents, 8) for documents in (1, 1024, 16384)}) == 1
    assert planning_ops(1024, 64) == planning_ops(1024, 2)
    assert planning_ops(16384, 8) < 20


def planning_seconds(documents, world):
    ids = ids_of_equal_documents(documents)
    start = time.thread_time()  # of the processor, not of the machine's other work
    blockcp.plan(doc_ids=ids, world_size=world, rank=world // 2)
    return time.thread_time() - start


def least_ratio(documents_and_world, more):
    """How many times longer the second plan takes, side by side; the least of several, which noise disturbs least."""
    ratios = []
    for _ in range(9):
        once = planning_seconds(*documents_and_world)
        ratios.append(planning_seconds(*more) / once)
    return min(ratios)


def test_PM_07_planning_takes_time_by_documents_and_not_by_their_square_or_the_ranks():
    assert least_ratio((2048, 8), (16384, 8)) < 20  # of 8 times the documents; their square is 64 times
    assert least_ratio((16384, 8), (16384, 256)) < 4  # of 32 times the ranks


def test_numbers_reads_the_notation():
    assert numbers("0 .5 | 1") == [0, 0.5, 1]
