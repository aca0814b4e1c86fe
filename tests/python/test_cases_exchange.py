"""Reported cases about exchanges and agreement, by id."""

import itertools
import json
import os

import numpy
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from probe import expect, expect_oracle, ids_of, on_all_paths
from problems import PATHS, check
from ranks import ordinary_call, outcomes, run_ranks, same_error
from test_cases_kernel import problem

import blockcp

pytestmark = pytest.mark.dist


def test_EX_02_the_first_call_of_a_group_is_a_halo():
    ids = ids_of([4, 8, 4])
    results = on_all_paths(4, ids, paths=("halo",), fresh=True)
    expect(results, "0 .5 1 1.5 | 4 4.5 5 5.5 | 6 6.5 7 7.5 | 12 12.5 13 13.5")


def test_EX_03_splits_of_zero_rows():
    for lengths, pad in (([5], 11), ([4, 4, 4, 4], 0), ([], 16)):
        ids = ids_of(lengths, pad)
        results = on_all_paths(4, ids, paths=("a2a",))
        expect_oracle(results, ids, pads=range(sum(lengths), 16))
    expect(on_all_paths(4, ids_of([5], 11), paths=("a2a",)), "0 .5 1 1.5 | 2 0 0 0 | 0 0 0 0 | 0 0 0 0")
    matrix = blockcp.plan(lengths=[5], rows=16, world_size=4, rank=2).split_matrix()
    assert matrix == [[4, 4, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    ins, outs = zip(*(needed(r, 4)[:2] for r in range(4)))
    assert [list(row) for row in ins] == matrix and [list(row) for row in zip(*outs)] == matrix


def needed(rank, world):
    return blockcp.plan(lengths=[5], rows=16, world_size=world, rank=rank).needed_splits()


def nothing_to_exchange(rank, world):
    for ids, mask, path in (
        (ids_of([4] * world), {}, "halo"),
        (ids_of([4 * world]), {"window": 1}, "auto"),
        (ids_of([4] * world), {}, "ring"),
    ):
        before = blockcp.exchange.traffic()
        case = problem(ids, mask=mask)
        assert check(rank, world, case, paths=(path,)) == 1
        assert blockcp.exchange.traffic() == before
    for batch, rows in ((0, 8), (2, 0)):
        plan = blockcp.plan(doc_ids=torch.zeros(batch, rows, dtype=torch.int64), world_size=world, rank=rank)
        q = torch.zeros(batch, 4, plan.local_rows, 8, requires_grad=True)
        k = torch.zeros(batch, 2, plan.local_rows, 8, requires_grad=True)
        out, lse = blockcp.attention(q, k, k, plan, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
        out.sum().backward()
        assert q.grad.shape == q.shape and k.grad.shape == k.shape


@pytest.mark.parametrize("world", [1, 2, 4])
def test_EX_04_nothing_to_exchange(world):
    run_ranks(world, nothing_to_exchange)


def wrong_group(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=2, rank=rank % 2)
    x = torch.zeros(1, 2, 4, 4)
    traffic, name = torch.ops.blockcp.group_traffic, dist.group.WORLD.group_name
    ordinary_call(rank, world)
    before = traffic(name)
    assert sum(before) > 0 or rank == 3  # all of whose rows are padding
    try:
        blockcp.attention(x, x, x, plan, group=dist.group.WORLD)
    finally:
        assert traffic(name) == before


def test_EX_15_group_of_another_size_and_nothing_is_sent():
    message = same_error(4, wrong_group)
    assert "the plan is for 2" in message and "has 4" in message


def test_EX_16_any_number_of_ranks():
    results = on_all_paths(4, ids_of([6, 2, 5, 3]))
    assert "halo" in results
    expect(
        results,
        "0 .5 1 1.5 | 2 2.5 6 6.5 | 8 8.5 9 9.5 | 10 13 13.5 14",
        "2.45 1.45 .95 .616667 | .366667 .166667 1.5 .5 | 2.283333 1.283333 .783333 .45 | .2 1.833333 .833333 .333333",
    )
    plan = blockcp.plan(lengths=[6, 2, 5, 3], world_size=4, rank=0)
    assert plan.kv()["recv"] == [0, 4, 0, 4]
    plan = blockcp.plan(lengths=[10, 6], world_size=4, rank=3)
    assert plan.kv()["recv"] == [0, 4, 8, 2] and not plan.kv()["use_halo"]
    assert plan.split_matrix() == [[4, 4, 4, 0], [0, 4, 4, 0], [0, 0, 4, 2], [0, 0, 0, 4]]
    assert "halo" not in on_all_paths(4, ids_of([10, 6]))
    plan = blockcp.plan(lengths=[2, 9, 1], world_size=3, rank=1)
    assert plan.kv()["recv"] == [0, 2, 6] and plan.split_matrix() == [[4, 2, 2], [0, 4, 4], [0, 0, 4]]
    expect(
        on_all_paths(3, ids_of([2, 9, 1])),
        "0 .5 2 2.5 | 3 3.5 4 4.5 | 5 5.5 6 11",
        "1.5 .5 2.828968 1.828968 | 1.328968 .995635 .745635 .545635 | .378968 .236111 .111111 1",
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_EX_16_uneven_documents(world):
    lengths = [2, 3 * world - 1, 1, world - 1]
    ids = ids_of(lengths, -sum(lengths) % world + world)
    assert set(run_ranks(world, check, problem(ids, dims=(8, 8)))) <= {3, 4}


def bytes_of(rank, world, hq, hkv, path):
    plan = blockcp.plan(lengths=[6, 2, 5, 3], world_size=world, rank=rank, exchange=path)
    q, k, v = (torch.randn(1, h, 4, 8, requires_grad=True) for h in (hq, hkv, hkv))
    counts = [blockcp.exchange.traffic()]
    out = blockcp.attention(q, k, v, plan)
    counts.append(blockcp.exchange.traffic())
    out.sum().backward()
    counts.append(blockcp.exchange.traffic())
    return [tuple(b - a for a, b in zip(x, y)) for x, y in itertools.pairwise(counts)]


@pytest.mark.parametrize("path", PATHS)
def test_PM_06_keys_travel_with_their_own_heads(path):
    many, few, one = (run_ranks(4, bytes_of, hq, hkv, path) for hq, hkv in ((16, 2), (2, 2), (16, 1)))
    assert many == few
    assert [[tuple(2 * n for n in pair) for pair in rank] for rank in one] == many
    assert sum(rank[0][0] for rank in many) == sum(rank[0][1] for rank in many) > 0
    plan = blockcp.plan(lengths=[6, 2, 5, 3], world_size=4, rank=0, exchange=path)
    row = 2 * (8 + 8) * 4
    needed = sum(n for s, line in enumerate(plan.split_matrix()) for r, n in enumerate(line) if r != s)
    received = sum(rank[0][1] for rank in many) // row
    assert received == needed if path in ("halo", "a2a") else received >= needed
    assert json.loads(plan.to_json())


def bad_calls():
    """What, done on one rank alone, must become one error on all; and words of it."""
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    good = {"q": q, "k": k, "v": k}
    return [
        ({**good, "q": q[:, :, :3]}, ["rows"]),
        ({**good, "q": torch.zeros(2, 4, 4, 8), "k": k.repeat(2, 1, 1, 1), "v": k.repeat(2, 1, 1, 1)}, ["batch", "2"]),
        (
            {**good, "q": torch.zeros(1, 28, 4, 8), "k": torch.zeros(1, 8, 4, 8), "v": torch.zeros(1, 8, 4, 8)},
            ["28", "8"],
        ),
        ({**good, "q": torch.zeros(1, 3, 4, 8)}, ["3", "2"]),
        ({**good, "q": torch.zeros(1, 1, 4, 8)}, ["1", "2"]),
        ({**good, "v": torch.zeros(1, 4, 4, 8)}, ["2", "4"]),
        ({**good, "q": q.double()}, ["Double", "Float"]),
        ({**good, "q": torch.zeros(1, 4, 4, 16)}, ["16", "8"]),
        ({**good, "q": q.int(), "k": k.int(), "v": k.int()}, ["Int"]),
        ({**good, "q": q[0]}, ["four dimensions"]),
        ({**good, "mask": "nope"}, ["nope", "full"]),
        ({**good, "kernel": "nope"}, ["nope"]),
        ({**good, "scale": 3.0}, ["scale", "3"]),
        ({**good, "q": q.to(torch.bfloat16), "k": k.to(torch.bfloat16), "v": k.to(torch.bfloat16)}, ["bf16", "fp32"]),
        ({**good, "q": torch.zeros(1, 6, 4, 8)}, ["6", "4"]),
        ({**good, "q": q.clone().requires_grad_()}, ["gradients"]),
        ({**good, "lengths": [5, 3]}, ["same documents"]),
        ({**good, "exchange": "ring"}, ["same exchange", "ring", "allgather"]),
        ({**good, "masks": blockcp.Mask(window=2)}, ["same mask", "causal, window 2"]),
        ({**good, "masks": blockcp.Mask(spans=[0, 1, 1, 0, 0, 0, 0, 0])}, ["same mask", "causal, spans (left)"]),
    ]


def bad_call(rank, world, number, bad_rank):
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    given = bad_calls()[number][0] if rank == bad_rank else {"q": q, "k": k, "v": k}
    given = {"lengths": [6, 2], "exchange": "allgather", "masks": None, **given}
    plan = blockcp.plan(
        lengths=given.pop("lengths"),
        world_size=world,
        rank=rank,
        masks=given.pop("masks"),
        exchange=given.pop("exchange"),
    )
    blockcp.attention(plan=plan, **given)


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_mistake_on_one_rank_is_one_error_on_all(number, bad_rank):
    message = same_error(2, bad_call, number, bad_rank)
    assert all(word in message for word in bad_calls()[number][1]), message
    assert "\n" not in message and message.startswith("[")


def odd_arguments():
    """Arguments that the op could not even be called with, and what the error must name."""
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    shapes = {"q": q.to("meta"), "k": k.to("meta"), "v": k.to("meta")}
    return [
        ({"scale": "x"}, "'x'"),
        ({"scale": float("nan")}, "nan"),
        ({"scale": torch.tensor([1.0, 2.0])}, "torch.float32 tensor of shape [2]"),
        ({"scale": 10**400}, "1000"),
        ({"scale": 10**5000}, "int that cannot"),
        ({"scale": numpy.array([[1.0, 2.0], [3.0, 4.0]])}, "array([[1., 2.], [3., 4.]])"),
        ({"scale": torch.tensor(1j)}, "scale"),
        ({"scale": torch._nested_tensor_from_tensor_list([q[0]])}, "tensor nested"),
        ({"scale": torch.tensor(1.0, device="meta")}, "scale"),
        ({"format": "lbhd"}, "'lbhd'"),
        ({"format": numpy.array(["bhld", "blhd"])}, "format"),
        ({"agreement": "none"}, "'none'"),
        ({"agreement": numpy.array(["call", "step"])}, "agreement"),
        ({"mask": 3}, "3"),
        ({"kernel": 3}, "3"),
        ({"q": q.numpy()}, "ndarray"),
        ({"q": q.to_sparse()}, "sparse"),
        ({"q": q.to_sparse(), "format": "blhd"}, "sparse"),
        ({"q": torch._nested_tensor_from_tensor_list([q[0]])}, "nested"),
        ({"k": torch._empty_affine_quantized([1, 2, 4, 8], scale=1.0, zero_point=0, dtype=torch.qint8)}, "quantized"),
        ({"q": None}, "NoneType"),
        ({"plan": None}, "None"),
        ({"plan": q}, "tensor of shape [1, 4, 4, 8]"),
        ({"plan": torch.Tensor}, "torch.Tensor"),
        ({"q": shapes["q"]}, "meta, cpu and cpu"),
        ({"k": shapes["k"]}, "cpu, meta and cpu"),
        ({"v": shapes["v"]}, "cpu, cpu and meta"),
        (shapes, "meta"),
    ]


def odd_call(rank, world, number):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
    blockcp.attention(**{"q": q, "k": k, "v": k, "plan": plan, **(odd_arguments()[number][0] if rank == 1 else {})})


@pytest.mark.parametrize("number", range(len(odd_arguments())))
def test_an_argument_of_no_sense_on_one_rank_is_one_error_on_all(number):
    message = same_error(2, odd_call, number)
    assert odd_arguments()[number][1] in message and "rank 1 of 2" in message and "\n" not in message


def odd_exchanges():
    """An exchange, what rank 1 changes in its call, and what the error must name."""
    x = torch.zeros(1, 2, 4, 8)
    gather, halo, needed, unshard = "all_gather", "left_halo", "needed_rows", "unshard"
    tensors = [
        ([1.0], "list"),
        (None, "NoneType"),
        (x.to_sparse(), "sparse"),
        (x.to("meta"), "meta"),
        (torch._nested_tensor_from_tensor_list([x[0]]), "nested"),
    ]
    return [
        *((name, {"x": value}, words) for name in (gather, halo, needed) for value, words in tensors),
        *((unshard, {"tensor": value}, words) for value, words in tensors),
        *((name, {"dim": 9}, "dim") for name in (gather, halo, needed, unshard)),
        *((name, {"dim": "a"}, "'a'") for name in (gather, halo, needed, unshard)),
        *((gather, {"dim": value}, "dim") for value in (None, 1.0, True, 2**70)),
        (gather, {"x": torch.tensor(1.0)}, "dim"),
        (gather, {"dim": torch._nested_tensor_from_tensor_list([x[0]])}, "nested"),
        *((halo, {"halo_size": value}, "halo_size") for value in (9, -1, 1.5, True, "a", None, 2**70)),
        *((needed, {"in_splits": value}, "in_splits") for value in (None, 1, [1.5, 1], ["a", 1], "ab", [True, 1])),
        *((needed, {"out_splits": value}, "out_splits") for value in (None, [1, None], [2**70, 1], [-1, 1])),
        (needed, {"out_splits": [1]}, "[1]"),
        (needed, {"in_splits": [1, 1, 0]}, "[1, 1, 0]"),
        (needed, {"send_index": [0.5, 0.5]}, "send_index"),
        (needed, {"send_index": [[0], [0, 1]]}, "send_index"),
        (needed, {"send_index": "ab"}, "'ab'"),
        (needed, {"send_index": None}, "None"),
        (needed, {"send_index": [0, 2**70]}, "send_index"),
        (needed, {"send_index": [True, False]}, "bool"),
        (needed, {"send_index": torch.zeros(2, dtype=torch.int64, device="meta")}, "send_index"),
        (needed, {"send_index": [0]}, "1"),
        (needed, {"send_index": [0, 4]}, "below 4"),
        (unshard, {"plan": None}, "None"),
        (unshard, {"plan": 5}, "5"),
        (unshard, {"plan": blockcp.plan(lengths=[6, 2], world_size=1, rank=0)}, "plan is for 1"),
        (unshard, {"tensor": x[:, :, 1:]}, "[1, 2, 3, 8]"),
    ]


def odd_exchange(rank, world, number):
    name, changes, _ = odd_exchanges()[number]
    x = torch.zeros(1, 2, 4, 8)
    given = {
        "all_gather": {"x": x},
        "left_halo": {"x": x, "halo_size": 1},
        "needed_rows": {"x": x, "in_splits": [1, 1], "out_splits": [1, 1], "send_index": [0, 0]},
        "unshard": {"tensor": x, "plan": blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)},
    }[name]
    call = blockcp.unshard if name == "unshard" else getattr(blockcp.exchange, name)
    call(**{**given, "dim": 2, "group": dist.group.WORLD, **(changes if rank == 1 else {})})


@pytest.mark.parametrize("number", range(len(odd_exchanges())))
def test_a_mistake_in_an_exchange_on_one_rank_is_one_error_on_all(number):
    message = same_error(2, odd_exchange, number)
    assert message.startswith("[") and "rank 1 of 2" in message and "\n" not in message
    assert odd_exchanges()[number][2] in message


def unlike(what):
    """Two tensors, and the dims to move along, that must not meet: each alone is a good call."""
    x = torch.zeros(4, 4, 4)
    return {
        "bf16 and fp16": ((x.bfloat16(), 1), (x.half(), 1), ["dtype", "Half vs BFloat16"]),
        "fp32 and int32": ((x, 1), (x.int(), 1), ["dtype", "Int vs Float"]),
        "shapes": ((torch.zeros(2, 4, 3), 1), (torch.zeros(3, 4, 2), 1), ["shape", "[3, rows, 2] vs [2, rows, 3]"]),
        "dims": ((x, 0), (x, 1), ["dim", "[4, rows, 4] vs [rows, 4, 4]"]),
        "numbers of dims": ((x, 1), (x.reshape(4, 4, 2, 2), 1), ["shape", "[4, rows, 2, 2] vs [4, rows, 4]"]),
        "gradients": ((x, 1), (x.clone().requires_grad_(), 1), ["gradients", "with gradients vs without"]),
    }[what]


UNLIKE = ("bf16 and fp16", "fp32 and int32", "shapes", "dims", "numbers of dims", "gradients")


def unlike_exchange(rank, world, name, what):
    x, dim = unlike(what)[rank]
    if name == "unshard":
        blockcp.unshard(x, blockcp.plan(lengths=[8], world_size=world, rank=rank), dim=dim)
    elif name == "needed_rows":
        blockcp.exchange.needed_rows(x, None, [1, 1], [1, 1], [0, 0], dim=dim)
    else:
        getattr(blockcp.exchange, name)(x, dim=dim, **({"halo_size": 1} if name == "left_halo" else {}))


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("name", ["all_gather", "left_halo", "needed_rows", "unshard"])
def test_exchanges_that_are_not_alike_are_refused_on_all_ranks(name, what):
    message = same_error(2, unlike_exchange, name, what)
    assert message.startswith("[agreement]") and all(word in message for word in unlike(what)[2]), message


def backward_of_one(rank, world):
    """Nothing is left behind: a backward that both ranks run follows the refused call."""
    with pytest.raises(ValueError, match="gradients"):
        blockcp.exchange.all_gather(torch.ones(2).requires_grad_(rank == 0), dim=0)
    x = torch.ones(2, requires_grad=True)
    blockcp.exchange.all_gather(x, dim=0).sum().backward()
    with torch.no_grad():
        blockcp.exchange.all_gather(x, dim=0)
    return x.grad.tolist()


def test_gradients_that_one_rank_wants_are_refused_in_forward():
    assert run_ranks(2, backward_of_one) == [[2, 2]] * 2


def tangent_of_one(rank, world, name):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    x = torch.zeros(1, 2, 4, 8)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x, torch.ones_like(x)) if rank == 1 else x
        blockcp.attention(x, x, x, plan) if name == "attention" else blockcp.unshard(x, plan, dim=2)


@pytest.mark.parametrize("name", ["attention", "unshard"])
def test_forward_mode_on_one_rank_is_one_error_on_all(name):
    assert "forward-mode" in same_error(2, tangent_of_one, name)


def default_scale(rank, world):
    plan = blockcp.plan(lengths=[1] * world, world_size=world, rank=rank)
    for width in range(1, 200):
        x = torch.zeros(1, 1, 1, width)
        blockcp.attention(x, x, x, plan, scale=width**-0.5 if rank else None)


def test_the_default_scale_is_what_it_is_spelled_out():
    run_ranks(2, default_scale)


def complex_rows(rank, world):
    x = torch.tensor([1j, 2 + rank], dtype=torch.complex64, requires_grad=True)
    everything = blockcp.exchange.all_gather(x, dim=0)
    weights = torch.tensor([1 + 1j, 2j] * world, dtype=torch.complex64) * (rank + 1)
    (grad,) = torch.autograd.grad((everything * weights).real.sum(), x)
    return everything.tolist(), grad.conj().tolist()


def test_complex_rows_have_gradients():
    expected = [1j, 2, 1j, 3], [3 + 3j, 6j]
    assert run_ranks(2, complex_rows) == [expected] * 2


def needed_of_a_batch(rank, world):
    plan = blockcp.plan(lengths=[[3 * world - 1, 2], [world, world]], rows=4 * world, world_size=world, rank=rank)
    whole = torch.arange(2.0 * 4 * world).reshape(2, 1, 4 * world, 1)
    x = whole[:, :, 4 * rank : 4 * rank + 4]
    rows = blockcp.exchange.needed_rows(x.transpose(1, 2).flatten(0, 1), None, *plan.needed_splits(), dim=0)
    needed = plan.visible().any(1).reshape(2, world, 4)
    parts = whole.reshape(2, world, 4)
    assert rows.flatten().tolist() == [n for r in range(world) for n in parts[:, r][needed[:, r]].tolist()]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_needed_rows_of_several_sequences(world):
    run_ranks(world, needed_of_a_batch)


def another_group(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=2, rank=rank % 2)
    blockcp.unshard(torch.zeros(1, 4, 2), plan, dist.group.WORLD)


def test_unshard_in_a_group_of_another_size():
    message = same_error(4, another_group)
    assert "plan is for 2" in message and "group has 4" in message


def different_kinds_of_calls(rank, world):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    x = torch.zeros(1, 2, 4, 8)
    blockcp.unshard(x, plan, dim=2) if rank else blockcp.attention(x, x, x, plan)


def test_attention_that_meets_an_exchange_is_one_error_on_all():
    assert "rank 1 makes another kind of call" in same_error(2, different_kinds_of_calls)


def heads_that_do_not_divide(rank, world, hq, hkv, hv):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    blockcp.attention(torch.zeros(1, hq, 4, 8), torch.zeros(1, hkv, 4, 8), torch.zeros(1, hv, 4, 8), plan)


@pytest.mark.parametrize("heads", [(28, 8, 8), (4, 3, 3), (2, 4, 4), (8, 4, 2)])
def test_VA_01_head_counts_that_do_not_divide(heads):
    message = same_error(2, heads_that_do_not_divide, *heads)
    named = heads[:2] if heads[1] == heads[2] else heads[1:]
    assert all(str(n) in message for n in named)


def wrong_rank(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=world, rank=0)
    x = torch.zeros(1, 2, 4, 4)
    blockcp.attention(x, x, x, plan)


def test_plan_of_another_rank():
    assert "rank 0" in same_error(2, wrong_rank)


def in_subgroups(rank, world):
    """Two groups of two, {0, 2} and {3, 1}: ranks are ranks within the group."""
    members = [[0, 2], [3, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    group = groups[mine]
    return check_in(group, dist.get_rank(group))


def check_in(group, rank):
    from problems import attend, error, tensors

    case = problem(ids_of([6, 5, 4], 1))
    whole = tensors(case)
    alone = attend(case, "auto", 0, 1, whole, group="")
    for path in PATHS:
        for got, want in zip(attend(case, path, rank, 2, whole, group=group), alone):
            assert error(got, want[:, :, 8 * rank : 8 * rank + 8].double()) < 1e-5
    plan = blockcp.plan(lengths=[15], rows=16, group=group)
    return plan.rank, plan.world_size


def test_sub_groups():
    values = run_ranks(4, in_subgroups)
    assert sorted(values) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def a_rank_dies(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=world, rank=rank)
    x = torch.zeros(1, 2, 8 // world, 4)
    blockcp.attention(x, x, x, plan)
    if rank == 1:
        os._exit(3)
    errors = []
    for _ in range(2):
        try:
            blockcp.attention(x, x, x, plan)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_rank_that_dies_breaks_the_group():
    survivor, dead = outcomes(2, a_rank_dies, fresh=True)
    assert dead.kind == "died"
    first, second = survivor.value
    assert first.startswith("[transport]") and "rank 0 of 2" in first
    assert "broke before" in second


def inner_products(rank, world):
    """<A x, y> = <x, A' y> over all ranks, for the three collectives."""
    generator = torch.Generator().manual_seed(5 + rank)
    plan = blockcp.plan(lengths=[5 * world - 3], rows=5 * world, world_size=world, rank=rank)
    splits = plan.needed_splits()
    calls = {
        "all_gather": lambda x, dim: blockcp.exchange.all_gather(x, dim=dim),
        "left_halo": lambda x, dim: blockcp.exchange.left_halo(x, halo_size=3, dim=dim),
        "needed_rows": lambda x, dim: blockcp.exchange.needed_rows(x, None, *splits, dim=dim),
    }
    for name, call in calls.items():
        for dim, shape in ((2, (2, 3, 5, 4)), (0, (5, 7)), (-1, (2, 5))):
            x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            moved = call(x, dim)
            y = torch.randn(moved.shape, generator=generator, dtype=torch.float64)
            (back,) = torch.autograd.grad(moved, x, y)
            both = torch.tensor([(moved.detach() * y).sum(), (x.detach() * back).sum()])
            dist.all_reduce(both)
            torch.testing.assert_close(both[0], both[1], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_and_their_adjoints(world):
    run_ranks(world, inner_products)


def moved(rank, world):
    x = (10 * rank + torch.arange(4.0)).reshape(4, 1)
    everything = blockcp.exchange.all_gather(x, dim=0)[:, 0].tolist()
    halo = blockcp.exchange.left_halo(x, halo_size=2, dim=0)[:, 0].tolist()
    plan = blockcp.plan(lengths=[10], rows=4 * world, world_size=world, rank=rank)
    needed = blockcp.exchange.needed_rows(x, None, *plan.needed_splits(), dim=0)[:, 0].tolist()
    bf16 = torch.ones(4, 1, dtype=torch.bfloat16, requires_grad=True)
    blockcp.exchange.all_gather(bf16, dim=0).sum().backward()
    assert bf16.grad.tolist() == [[world]] * 4
    assert blockcp.exchange.all_gather(torch.tensor([rank]), dim=0).tolist() == list(range(world))
    return everything, halo, needed


def test_what_the_collectives_deliver():
    values = run_ranks(3, moved)
    everything = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert [v[0] for v in values] == [everything] * 3
    assert [v[1] for v in values] == [[22, 23], [2, 3], [12, 13]]
    assert [v[2] for v in values] == [everything[:4], everything[:8], everything[:10]]


def rounded_once(rank, world):
    """Three gradients of bf16 whose sum is exact in fp32: added one by one in bf16, the small ones would be lost."""
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    blockcp.exchange.all_gather(x, dim=0).backward(torch.full((3, 1), 1.0 if rank == 0 else 2.0**-8).bfloat16())
    return x.grad.item()


def test_gradients_are_summed_wide_and_rounded_once():
    assert run_ranks(3, rounded_once) == [1 + 2.0**-7] * 3


def over_a_mesh(rank, world):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = mesh["cp"]
    plan = blockcp.plan(lengths=[6, 2], mesh=cp)
    assert (plan.world_size, plan.rank) == (2, rank % 2)
    v = torch.arange(4.0 * plan.rank, 4 * plan.rank + 4).reshape(1, 1, 4, 1)
    x = torch.zeros(1, 1, 4, 1)
    out = blockcp.attention(x, x, v, plan, group=cp)
    assert torch.equal(blockcp.unshard(out, plan, cp, dim=2)[:, :, plan.rank * 4 :][:, :, :4], out)
    for wrong in (lambda: blockcp.plan(lengths=[8], mesh=mesh), lambda: blockcp.plan(lengths=[8], mesh=cp, group="x")):
        with pytest.raises(ValueError, match="mesh"):
            wrong()
    return out.flatten().tolist()


def test_device_meshes():
    first, second, *_ = run_ranks(4, over_a_mesh)
    assert first + second == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 6, 6.5])


def uneven_rows(rank, world):
    blockcp.exchange.all_gather(torch.zeros(1, 1, 4 + rank, 2))


def bad_index(rank, world):
    splits = [1] * world
    blockcp.exchange.needed_rows(torch.zeros(4, 2), None, splits, splits, [9 if rank else 0] * world, dim=0)


def test_collectives_refuse_on_all_ranks():
    assert "rank 0 sends 4 rows" in same_error(2, uneven_rows)
    assert "9" in same_error(2, bad_index)
