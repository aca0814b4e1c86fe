"""Activation checkpointing around F.scaled_dot_product_attention in a step: where the recomputation finds its plan."""

import gc
import re

import pytest
import torch
import torch.nn.functional as F
from ranks import ordinary_call, outcomes, run_ranks
from torch.utils.checkpoint import CheckpointError, checkpoint

import blockcp

WAITING = r"\[step\] .* (\d) of its reentrant checkpoints have had no backward .* Run the backward inside the step"
OUTSIDE = r"\[step\] .* in the step of their forward, but this backward runs outside it"


def case(*lengths):
    """(plan, x) of one rank."""
    return blockcp.plan(lengths=lengths), torch.randn(1, 2, sum(lengths), 4, requires_grad=True)


def layer(x):
    return x + F.scaled_dot_product_attention(x, x, x).sin()


def layer_of(plan):
    return lambda x: x + blockcp.attention(x, x, x, plan).sin()


def again(fn, x):
    return checkpoint(fn, x, use_reentrant=True)


def two_layers(x):
    return again(layer, again(layer, x))


def nested(x):
    return again(lambda x: again(layer, layer(x)), x)


def partly(x):
    """The first checkpoint is recomputed in the step, the second is not."""
    again(layer, x).sum().backward()
    return again(layer, x)


class Own(torch.autograd.Function):
    """A checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(layer(x), x, grad)[0]


@pytest.mark.parametrize(
    "forward,waiting", [(lambda x: again(layer, x), 1), (two_layers, 2), (nested, 1), (partly, 1), (Own.apply, 1)]
)
def test_leaving_a_step_before_the_backward_is_an_error(forward, waiting):
    plan, x = case(3, 5, 4)
    with pytest.raises(RuntimeError, match=WAITING) as raised:
        with blockcp.step(plan):
            y = forward(x)
    assert f" {waiting} of its" in str(raised.value)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        y.sum().backward()


def backward_after_the_step(rank, world):
    plan = blockcp.plan(lengths=[7, 9], world_size=world, rank=rank)
    x = torch.randn(1, 2, plan.local_rows, 4, requires_grad=True)
    with blockcp.step(plan):
        y = again(layer, x)
    y.sum().backward()


@pytest.mark.dist
def test_leaving_a_step_before_the_backward_is_an_error_on_ranks():
    for rank, outcome in enumerate(outcomes(2, backward_after_the_step)):
        assert re.match(WAITING, outcome.message) and f"rank {rank} of 2" in outcome.message, outcome
    run_ranks(2, ordinary_call)


@pytest.mark.parametrize("forward,as_if", [(two_layers, 2), (nested, 2), (Own.apply, 1)])
def test_several_steps_in_a_row(forward, as_if):
    for lengths in ((3, 5, 4), (12,), (1, 11)):
        plan, x = case(*lengths)
        direct = x
        for _ in range(as_if):
            direct = layer_of(plan)(direct)
        (want,) = torch.autograd.grad(direct.square().sum(), x)
        with blockcp.step(plan):
            for _ in range(2):  # micro-batches
                x.grad = None
                forward(x).square().sum().backward()
        assert torch.equal(x.grad, want)


def test_calls_that_nothing_computes_again_are_no_error():
    plan, x = case(3, 5, 4)
    with blockcp.step(plan):
        with torch.no_grad():
            kept = layer(x), again(layer, x), two_layers(x), nested(x)
        with torch.inference_mode():
            kept += (layer(x.detach()), again(layer, x.detach()))
        kept += (again(layer, x.detach()), layer(x))
        again(layer, x)  # whose graph is gone
    kept[-1].sum().backward()
    (want,) = torch.autograd.grad(layer_of(plan)(x).sum(), x)
    assert torch.equal(x.grad, want)


def test_calls_with_a_plan_may_be_computed_again_after_the_step():
    plan, x = case(3, 5, 4)
    (want,) = torch.autograd.grad(layer_of(plan)(x).sum(), x)
    with blockcp.step(plan):
        y = again(layer_of(plan), x)
    y.sum().backward()
    assert torch.equal(x.grad, want)


def test_the_models_own_error_is_not_masked():
    plan, x = case(3, 5, 4)
    with pytest.raises(KeyError, match="model"):
        with blockcp.step(plan):
            y = again(layer, x)
            raise KeyError("model")
    with pytest.raises(RuntimeError, match=OUTSIDE):
        y.sum().backward()

    def broken(x):
        if torch.is_grad_enabled():
            raise KeyError("recomputation")
        return layer(x)

    with pytest.raises(KeyError, match="recomputation"):
        with blockcp.step(plan):
            again(broken, x).sum().backward()


def test_a_step_opened_again_does_not_wait_for_the_last_time():
    plan, x = case(3, 5, 4)
    step = blockcp.step(plan)
    with pytest.raises(KeyError):
        with step:
            y = again(layer, x)
            raise KeyError
    with step:
        layer(x)
    del y


def test_a_backward_in_another_step_is_an_error():
    (plan, x), (other, _) = case(3, 5, 4), case(6, 6)
    with blockcp.step(plan):
        y = again(layer, x)
        with pytest.raises(RuntimeError, match=OUTSIDE):
            with blockcp.step(other):
                layer(x)
                y.sum().backward()
        y = again(layer, x)
        with pytest.raises(RuntimeError, match=OUTSIDE):
            with blockcp.local():
                y.sum().backward()
        with pytest.raises(RuntimeError, match=WAITING):
            with blockcp.step(other):
                z = again(layer, x)
        del z


def test_noting_keeps_nothing_alive():
    plan, x = case(3, 5, 4)
    gc.collect()
    before = torch.ops.blockcp.plan_count()
    gc.disable()
    try:
        with blockcp.step(plan):
            two_layers(x).sum().backward()
            nested(x)
        del plan
        assert torch.ops.blockcp.plan_count() == before - 1
    finally:
        gc.enable()


def test_torch_refuses_the_other_kind_after_the_step():
    plan, x = case(3, 5, 4)
    with blockcp.step(plan):
        y = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()
