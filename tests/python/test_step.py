"""The training step's context and the drop-in for scaled_dot_product_attention, with the reported cases about them."""

import re
import threading

import pytest
import torch
import torch.nn.functional as F
from probe import ids_of
from problems import tensors
from ranks import outcomes, run_ranks, same_error
from test_cases_kernel import problem
from torch.utils.checkpoint import checkpoint

import blockcp

pytestmark = pytest.mark.dist

STOCK = F.scaled_dot_product_attention
LENGTHS = [6, 5, 4]


def local_case(rank, world, **mask):
    """(plan, q, k, v) of docs 6, 5, 4 and one row of padding."""
    case = problem(ids_of(LENGTHS, 1))
    plan = blockcp.plan(doc_ids=case["ids"], world_size=world, rank=rank, masks={"m": blockcp.Mask(**mask)})
    rows = slice(rank * plan.local_rows, (rank + 1) * plan.local_rows)
    q, k, v, _ = (x[:, :, rows].clone() for x in tensors(case))
    return plan, q, k, v


def same_as_attention(rank, world):
    plan, q, k, v = local_case(rank, world, window=4)
    want = blockcp.attention(q, k, v, plan)
    own = plan.visible("m")[0]
    additive = torch.zeros(own.shape).masked_fill(~own, -torch.inf)
    with blockcp.step(plan) as step:
        for attn_mask in (None, own, own[None, None], own.expand(4, *own.shape), additive):
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)
            assert torch.equal(got, want)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), want)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=True), want)
        assert step.calls == 7
    assert F.scaled_dot_product_attention is STOCK


@pytest.mark.parametrize("world", [1, 2])
def test_IN_03_the_plans_own_mask(world):
    run_ranks(world, same_as_attention)


WRONG = [
    ("windowed", ["differs"]),
    ("local", ["shape", "[8, 8]"]),
    ("values", ["0 and -inf"]),
    ("five sizes", ["shape", "[1, 1, 1, 8, 16]"]),
    ("other heads", ["shape", "[1, 4, 8, 16]", "[3, 8, 16]"]),
    ("one row", ["shape", "[16]"]),
    ("a list", ["dense tensor", "list"]),
    ("sparse", ["dense tensor"]),
    ("no data", ["cpu", "meta"]),
    ("learned", ["gradient"]),
    ("both", ["attn_mask", "is_causal"]),
    ("causal", ["is_causal", "Tensor"]),
    ("gqa", ["enable_gqa", "str"]),
    ("dropout", ["dropout", "0.1"]),
    ("no dropout", ["dropout_p", "NoneType"]),
    ("heads", ["4", "2", "enable_gqa"]),
    ("scale", ["scale", "x"]),
    ("two scales", ["scale", "[2]"]),
    ("no key", ["key", "NoneType"]),
]


def wrong_call(rank, world, what, bad_rank):
    plan, q, k, v = local_case(rank, world)
    own = plan.visible("m")[0]
    windowed = own & (torch.arange(16) >= torch.arange(8)[:, None] + 8 * rank - 1)
    zeros = torch.zeros(own.shape)
    calls = {
        "windowed": lambda: {"attn_mask": windowed},
        "local": lambda: {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()},
        "values": lambda: {"attn_mask": torch.full(own.shape, 0.5)},
        "five sizes": lambda: {"attn_mask": own[None, None, None]},
        "other heads": lambda: {"attn_mask": own.expand(3, *own.shape)},
        "one row": lambda: {"attn_mask": own[0]},
        "a list": lambda: {"attn_mask": own.tolist()},
        "sparse": lambda: {"attn_mask": own.to_sparse()},
        "no data": lambda: {"attn_mask": own.to("meta")},
        "learned": lambda: {"attn_mask": zeros.requires_grad_()},
        "both": lambda: {"attn_mask": own, "is_causal": True},
        "causal": lambda: {"is_causal": torch.tensor([True, True])},
        "gqa": lambda: {"enable_gqa": "yes"},
        "dropout": lambda: {"dropout_p": 0.1},
        "no dropout": lambda: {"dropout_p": None},
        "heads": lambda: {"enable_gqa": False},
        "scale": lambda: {"scale": "x"},
        "two scales": lambda: {"scale": torch.tensor([1.0, 2.0])},
        "no key": lambda: {"key": None},
    }
    call = {"query": q, "key": k, "value": v, "enable_gqa": True, **(calls[what]() if rank == bad_rank else {})}
    with blockcp.step(plan):
        F.scaled_dot_product_attention(**call)


@pytest.mark.parametrize("what,words", WRONG)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_IN_03_another_mask_is_one_error_on_all_ranks(what, words, bad_rank):
    message = same_error(2, wrong_call, what, bad_rank)
    assert re.match(r"\[(sdpa|torch)\] .* must .*, but .*$", message) and all(word in message for word in words)


def causal_call_of_a_full_plan(rank, world):
    plan, q, k, v = local_case(rank, world, causal=False)
    with blockcp.step(plan):
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_IN_03_causal_call_under_a_mask_that_is_not():
    assert "not causal" in same_error(2, causal_call_of_a_full_plan)


def other_shapes(rank, world):
    plan, q, k, v = local_case(rank, world)
    vision, five = torch.randn(1, 4, 5, 16), torch.randn(1, 4, 5, 16)
    q8 = torch.randn(1, 4, 8, 16)
    with blockcp.step(plan) as step:
        for args in ((vision, five, five), (q8, five, five)):
            assert torch.equal(F.scaled_dot_product_attention(*args), STOCK(*args))
        with blockcp.local():
            assert torch.equal(F.scaled_dot_product_attention(q8, q8, q8), STOCK(q8, q8, q8))
        assert step.calls == 0
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert step.calls == 1


def test_IN_08_calls_that_are_not_the_plans():
    run_ranks(2, other_shapes)


def test_outside_a_step_it_is_the_stock_function():
    q = torch.randn(1, 2, 5, 4)
    assert torch.equal(blockcp.sdpa(q, q, q, is_causal=True), STOCK(q, q, q, is_causal=True))
    mask = torch.rand(5, 5) < 0.8
    assert torch.equal(blockcp.sdpa(q, q, q, attn_mask=mask), STOCK(q, q, q, attn_mask=mask))


def test_a_step_without_attention_is_an_error():
    plan = blockcp.plan(lengths=[4])
    with pytest.raises(RuntimeError, match=r"\[step\] at least one attention call"):
        with blockcp.step(plan):
            pass
    assert F.scaled_dot_product_attention is STOCK


def test_the_models_own_error_comes_through():
    with pytest.raises(KeyError):
        with blockcp.step(blockcp.plan(lengths=[4])):
            raise KeyError("model")
    assert F.scaled_dot_product_attention is STOCK


def test_steps_nest():
    outer, inner = blockcp.plan(lengths=[4]), blockcp.plan(lengths=[2, 2])
    q = torch.randn(1, 1, 4, 4)
    with blockcp.step(outer) as first:
        with blockcp.step(inner) as second:
            got = F.scaled_dot_product_attention(q, q, q)
            blockcp.attention(q, q, q, outer)
        assert torch.equal(got, blockcp.attention(q, q, q, inner))
        assert F.scaled_dot_product_attention is blockcp.sdpa
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), blockcp.attention(q, q, q, outer))
    assert (first.calls, second.calls) == (3, 1)


def in_thread(body):
    result = []
    thread = threading.Thread(target=lambda: result.append(body()))
    thread.start()
    thread.join()
    return result[0]


def test_other_threads_find_the_only_step():
    plan, q = blockcp.plan(lengths=[2, 2]), torch.randn(1, 1, 4, 4)
    want = blockcp.attention(q, q, q, plan)

    def call():
        return F.scaled_dot_product_attention(q, q, q)

    with blockcp.step(plan) as step:
        assert torch.equal(in_thread(call), want)
        assert step.calls == 1


def test_other_threads_do_not_guess_between_steps():
    q = torch.randn(1, 1, 4, 4)

    def call():
        with pytest.raises(RuntimeError, match="there are 2"):
            F.scaled_dot_product_attention(q, q, q)
        return True

    outer = blockcp.plan(lengths=[4])
    with blockcp.step(outer), blockcp.step(blockcp.plan(lengths=[2, 2])):
        assert in_thread(call)
        blockcp.sdpa(q, q, q)
        blockcp.attention(q, q, q, outer)


def test_a_step_of_several_masks_needs_to_be_told_which():
    masks = {"a": blockcp.Mask(), "b": blockcp.Mask(window=2)}
    plan, q = blockcp.plan(lengths=[4], masks=masks), torch.randn(1, 1, 4, 4)
    for attn_mask in (None, plan.visible("a")):
        with pytest.raises(ValueError, match="mask"):
            with blockcp.step(plan):
                F.scaled_dot_product_attention(q, q, q, attn_mask=attn_mask)
    for name in ("c", ["a"], 1):
        with pytest.raises(ValueError, match=r"^\[step\] mask must be one of"):
            blockcp.step(plan, mask=name)
    with blockcp.step(plan, mask="b"):
        got = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(got, blockcp.attention(q, q, q, plan, mask="b"))


def recomputed(rank, world, reentrant):
    plan, q, k, v = local_case(rank, world)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square()

    want = torch.autograd.grad(blockcp.attention(q, k, v, plan).square().sum(), leaves)
    with blockcp.step(plan) as step:
        checkpoint(layer, q, k, v, use_reentrant=reentrant).sum().backward()
    assert step.calls == 2
    assert all(torch.equal(x.grad, w) for x, w in zip(leaves, want))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_inside_the_step(reentrant):
    run_ranks(2, recomputed, reentrant)


def agreement_traffic(rank, world):
    """With agreement="step" only the first call of a step is compared: a later mistake is found locally only."""
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    q = torch.zeros(1, 2, 4, 4)
    with blockcp.step(plan):
        for _ in range(3):
            blockcp.attention(q, q, q, plan, agreement="step")
    scale = 1.0 if rank else 2.0
    with pytest.raises(ValueError, match="scale"):
        blockcp.attention(q, q, q, plan, scale=scale, agreement="step")
    with pytest.raises(ValueError, match="agreement"):
        blockcp.attention(q, q, q, plan, agreement="never")


def test_agreement_once_a_step():
    run_ranks(2, agreement_traffic)


def no_group_to_take(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=world, rank=rank)
    x = torch.zeros(1, 1, 8 // world, 2)
    blockcp.attention(x, x, x, plan, group="no such group")


def test_unknown_group():
    assert all(outcome.kind for outcome in outcomes(2, no_group_to_take))
