"""Reported cases about gradients, by id."""

import inspect

import pytest
import torch
from probe import expect, expect_oracle, ids_of, on_all_paths
from problems import PATHS, attend, check, error, tensors
from ranks import run_ranks
from test_cases_kernel import problem

import blockcp

pytestmark = pytest.mark.dist


def test_BW_01_ring_gradients_of_one_long_document():
    dv = (
        "3.380729 2.380729 1.880729 1.547396 | 1.297396 1.097396 .930729 .787872 | "
        ".662872 .551761 .451761 .360852 | .277518 .200595 .129167 .0625"
    )
    expect(on_all_paths(4, ids_of([16]), paths=("ring",)), dv=dv)
    assert run_ranks(4, check, problem(ids_of([16]))) == [3] * 4


def test_BW_02_gradients_on_every_rank():
    assert run_ranks(3, check, problem(ids_of([2, 9, 1]), heads=(6, 2))) == [3] * 3
    assert run_ranks(4, check, problem(ids_of([3, 9, 4]), heads=(6, 2))) == [3] * 4
    dv = "1.833333 .833333 .333333 2.828968 | 1.828968 1.328968 .995635 .745635 | "
    dv += ".545635 .378968 .236111 .111111 | 2.083333 1.083333 .583333 .25"
    expect(on_all_paths(4, ids_of([3, 9, 4])), dv=dv)


def transposed_keys(rank, world):
    plan = blockcp.plan(lengths=[8], world_size=world, rank=rank, exchange="allgather")
    rows = torch.arange(4.0 * rank, 4 * rank + 4)
    v = rows.reshape(1, 4, 1, 1).expand(1, 4, 1, 4).clone().requires_grad_()
    k = torch.zeros(1, 4, 1, 4, requires_grad=True)
    out = blockcp.attention(torch.zeros(1, 1, 4, 4), k.transpose(1, 2), v.transpose(1, 2), plan)
    out.backward(torch.full_like(out, rank + 1.0))
    return v.grad[0, :, 0, 0].tolist()


def test_BW_03_every_contribution_exactly_once():
    first, second = run_ranks(2, transposed_keys)
    want = [sum((1 + (i >= 4)) / (i + 1) for i in range(j, 8)) for j in range(8)]
    assert first + second == pytest.approx(want, rel=1e-5)
    assert first[0] == pytest.approx(3.352381, abs=1e-5)


def weight_gradient(rank, world):
    ids = torch.tensor([ids_of([5, 7], 4)])
    torch.manual_seed(3)
    x, w = torch.randn(1, 16, 8), torch.randn(8, 3 * 16, requires_grad=True)
    plan = blockcp.plan(doc_ids=ids, world_size=world, rank=rank)
    local = x[:, rank * plan.local_rows : (rank + 1) * plan.local_rows]
    q, k, v = (t.unflatten(-1, (2, 8)) for t in (local @ w).chunk(3, -1))
    out = blockcp.attention(q, k, v, plan, format="blhd")
    (out.flatten(2).sum(-1) * (plan.doc_ids != 0)).sum().backward()
    torch.distributed.all_reduce(w.grad)
    return w.grad


def test_BW_04_no_factor_of_the_number_of_ranks():
    one = run_ranks(1, weight_gradient)[0]
    for world in (2, 4):
        for grad in run_ranks(world, weight_gradient):
            torch.testing.assert_close(grad, one, rtol=1e-5, atol=1e-5)


def every_argument(rank, world):
    spans = torch.tensor([0, 1, 1, 0, 0, 2, 2, 0])
    plans = {
        "scale": {"scale": 0.5},
        "window": {"mask": "window"},
        "spans": {"mask": "spans"},
        "format": {"format": "blhd"},
        "return_lse": {"return_lse": True},
        "kernel": {"kernel": "reference"},
        "agreement": {"agreement": "step"},
        "reproducible": {"reproducible": True},
        "group": {"group": torch.distributed.group.WORLD},
        "mask": {"mask": "full"},
    }
    arguments = set(inspect.signature(blockcp.attention).parameters) - {"q", "k", "v", "plan"}
    assert arguments <= set(plans)
    masks = {"full": blockcp.Mask(), "window": blockcp.Mask(window=3), "spans": blockcp.Mask(spans=spans)}
    for path in ("allgather", "a2a", "ring"):
        plan = blockcp.plan(lengths=[8], world_size=world, rank=rank, masks=masks, exchange=path)
        for given in (*plans.values(), {**plans["scale"], **plans["format"], **plans["return_lse"], **plans["spans"]}):
            arguments = {"mask": "full", **given}
            q, k, v = (torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3))
            out = blockcp.attention(q, k, v, plan, **arguments)
            out = out[0] if isinstance(out, tuple) else out
            out.sum().backward()
            assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_BW_05_every_optional_argument_then_backward():
    run_ranks(2, every_argument)


def subsets(rank, world):
    case = problem(ids_of([6, 5, 4], 1))
    whole = tensors(case)
    all_grads = attend(case, "a2a", rank, world, whole)
    for grads in range(1, 7):
        for got, want in zip(attend({**case, "grads": grads}, "a2a", rank, world, whole)[2:], all_grads[2:]):
            assert got is None or torch.equal(got, want)


def test_gradients_of_some_inputs_only():
    run_ranks(2, subsets)


def linear_in_dout(rank, world):
    case = problem(ids_of([3, 5]))
    q, k, v, dout = (x[:, :, 4 * rank : 4 * rank + 4].clone() for x in tensors(case))
    for path in PATHS:
        plan = blockcp.plan(doc_ids=case["ids"], world_size=world, rank=rank, exchange=path)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = blockcp.attention(*leaves, plan)
        once, twice = (torch.autograd.grad(out, leaves, g, retain_graph=True) for g in (dout, 2 * dout))
        assert all(torch.equal(2 * a, b) for a, b in zip(once, twice))
        dq, _, _ = torch.autograd.grad(out, leaves, dout if rank else torch.zeros_like(dout))
        assert rank == 1 or bool((dq == 0).all())


def test_BW_07_the_incoming_gradient_is_used():
    run_ranks(2, linear_in_dout)
    _, _, _, _, dv = on_all_paths(2, ids_of([3, 5]), dout=[0, 1])["a2a"]
    want = torch.zeros(8)
    for i in range(4, 8):
        want[3 : i + 1] += 2 / (i - 2)  # two query heads a KV head
    torch.testing.assert_close(dv[0, 0, :, 0], want)


def shared_tensors(rank, world):
    ids = ids_of([6, 2])
    for path in PATHS:
        plan = blockcp.plan(doc_ids=ids, world_size=world, rank=rank, exchange=path)
        q = torch.randn(1, 2, 4, 8, requires_grad=True)
        x = torch.randn(1, 2, 4, 8, requires_grad=True)
        kept = x.detach().clone()
        k, v = (x.detach().clone().requires_grad_() for _ in range(2))
        separate = torch.autograd.grad(blockcp.attention(q, k, v, plan).square().sum(), (k, v))
        for pair in ((x, x), (x.view(1, 2, 4, 8), x.view(2, 4, 8)[None])):
            (shared,) = torch.autograd.grad(blockcp.attention(q, *pair, plan).square().sum(), x)
            torch.testing.assert_close(shared, separate[0] + separate[1], rtol=1e-6, atol=1e-6)
        copies = [x.detach().clone().requires_grad_() for _ in range(3)]
        parts = torch.autograd.grad(blockcp.attention(*copies, plan).square().sum(), copies)
        (shared,) = torch.autograd.grad(blockcp.attention(x, x, x, plan).square().sum(), x)
        torch.testing.assert_close(shared, sum(parts), rtol=1e-5, atol=1e-5)
        assert torch.equal(x, kept)


def test_BW_09_key_and_value_are_one_tensor():
    run_ranks(2, shared_tensors)


def unused_output(rank, world):
    """Rank 0's loss does not depend on its out, but rank 1 needs its keys' gradients."""
    plan = blockcp.plan(lengths=[8], world_size=world, rank=rank)
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out = blockcp.attention(q, k, v, plan)
    (out * (0.0 if rank == 0 else 1.0)).sum().backward()
    assert (k.grad != 0).any()


def test_a_rank_whose_output_does_not_matter_takes_part():
    run_ranks(2, unused_output)


def test_the_comparison_can_fail():
    one = torch.ones(2)
    assert error(one, one.double() * 2) == 1
    assert error(torch.tensor([float("nan")]), one[:1].double()) == float("inf")
    ids = ids_of([3, 5])
    with pytest.raises(AssertionError):
        expect_oracle(on_all_paths(1, ids, {"window": 2}), ids)
