"""torch.compile around F.scaled_dot_product_attention in a step: one graph, the same for every plan, right numbers."""

import contextlib
import random
import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from ranks import run_ranks, same_error
from torch.utils.checkpoint import CheckpointError, checkpoint

import blockcp


@pytest.fixture
def seed():
    number = random.SystemRandom().randrange(2**31)
    print("seed", number)
    return number


def compiled(fn, backend="aot_eager", fullgraph=True):
    """``fn`` compiled by nothing compiled before, and what counts its graphs."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=fullgraph), counter


def attend(q, k, v, **more):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more).sin()


def plans(world, rank, **more):
    for lengths in ([3, 5, 8], [16], [1, 14], [9, 7]):
        yield blockcp.plan(lengths=lengths, rows=16, world_size=world, rank=rank, **more)


def inputs(plan, seed):
    generator = torch.Generator().manual_seed(seed + plan.rank)
    return [torch.randn(1, h, plan.local_rows, 4, generator=generator, requires_grad=True) for h in (4, 2, 2)]


def gradients(out, leaves):
    """By backward, since a reentrant checkpoint takes no other."""
    for x in leaves:
        x.grad = None
    out.square().sum().backward()
    return [x.grad for x in leaves]


def wanted(plan, leaves, mask=None):
    out = blockcp.attention(*leaves, plan, mask=mask).sin()
    return [out, *gradients(out, leaves)]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def one_graph(rank, world, seed, with_mask):
    fn, counter = compiled(attend)
    for plan in plans(world, rank):
        leaves = inputs(plan, seed)
        more = {"attn_mask": plan.visible()[:, None]} if with_mask else {}
        want = wanted(plan, leaves)
        with blockcp.step(plan) as step:
            out = fn(*leaves, **more)
            got = [out, *gradients(out, leaves)]
        close(got, want)
        assert step.calls == 1
    return counter.frame_count


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("with_mask", [False, True])
def test_one_graph_for_all_plans(world, with_mask, seed):
    assert run_ranks(world, one_graph, seed, with_mask) == [1] * world


def one_graph_without_gradients(rank, world, seed):
    fn, counter = compiled(attend)
    for plan in plans(world, rank):
        leaves = inputs(plan, seed)
        want = blockcp.attention(*leaves, plan).sin()
        with blockcp.step(plan) as step, torch.no_grad():
            torch.testing.assert_close(fn(*leaves), want)
        assert step.calls == 1
    return counter.frame_count


@pytest.mark.dist
def test_one_graph_without_gradients(seed):
    assert run_ranks(2, one_graph_without_gradients, seed) == [1, 1]


def wrong_compiled_call(rank, world, bad_rank, more):
    fn, _ = compiled(attend)
    plan = next(plans(world, rank))
    more = more(plan) if rank == bad_rank else {}
    with blockcp.step(plan):
        fn(*inputs(plan, 1), **more)


def other_values(plan):
    return {"attn_mask": torch.ones(plan.local_rows, plan.rows, dtype=torch.bool)}


def other_shape(plan):
    return {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}


def dropout(plan):
    return {"dropout_p": 0.5}


@pytest.mark.dist
@pytest.mark.parametrize("more,words", [(other_values, "differs"), (other_shape, "[3, 3]"), (dropout, "dropout")])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_mistake_in_a_compiled_call_is_one_error(bad_rank, more, words):
    message = same_error(2, wrong_compiled_call, bad_rank, more)
    assert message.startswith("[sdpa]") and words in message


def test_the_step_is_looked_up_in_each_call(seed):
    """Outside a step, in it, for other rows, under local(), in an inner step, in another thread, outside again."""
    fn, _ = compiled(attend)
    masks = {"a": blockcp.Mask(), "b": blockcp.Mask(window=2)}
    plan, inner = list(plans(1, 0, masks=masks))[:2]
    leaves, vision = inputs(plan, seed), [x[:, :, :5] for x in inputs(plan, seed)]
    stock, of_vision = attend(*leaves), attend(*vision)
    a, b, of_inner = (wanted(p, leaves, m)[0] for p, m in ((plan, "a"), (plan, "b"), (inner, "a")))
    torch.testing.assert_close(fn(*leaves), stock)
    with blockcp.step(plan, mask="a"):
        torch.testing.assert_close(fn(*leaves), a)
        torch.testing.assert_close(fn(*vision), of_vision)
        with blockcp.local():
            torch.testing.assert_close(fn(*leaves), stock)
        results = []
        thread = threading.Thread(target=lambda: results.append(fn(*leaves)))
        thread.start()
        thread.join()
        torch.testing.assert_close(results[0], a)
        with blockcp.step(inner, mask="a"):
            torch.testing.assert_close(fn(*leaves), of_inner)
        torch.testing.assert_close(fn(*leaves), a)
    with blockcp.step(plan, mask="b"):
        torch.testing.assert_close(fn(*leaves), b)
    torch.testing.assert_close(fn(*leaves), stock)


def test_local_inside_a_graph(seed):
    def both(q, k, v):
        with blockcp.local():
            own = attend(q, k, v)
        return own + attend(q, k, v)

    fn, _ = compiled(both)
    plan = next(plans(1, 0))
    leaves = inputs(plan, seed)
    with blockcp.step(plan) as step:
        got = fn(*leaves)
    torch.testing.assert_close(got, attend(*leaves) + wanted(plan, leaves)[0])
    assert step.calls == 1


def checkpointed(fn, reentrant):
    return lambda *x: checkpoint(fn, *x, use_reentrant=reentrant)


@contextlib.contextmanager
def as_eager(reentrant):
    """What a backward after the step comes to: an error at the end of the step, or in the backward."""
    kind, words = (RuntimeError, "reentrant checkpoints") if reentrant else (CheckpointError, "")
    with pytest.raises(kind, match=words):
        yield


def around(rank, world, seed, reentrant):
    """A checkpoint around a compiled function."""
    fn, counter = compiled(attend)
    for plan in plans(world, rank):
        leaves = inputs(plan, seed)
        want = wanted(plan, leaves)
        with blockcp.step(plan) as step:
            out = checkpointed(fn, reentrant)(*leaves)
            got = [out, *gradients(out, leaves)]
        close(got, want)
        assert step.calls == 2
    graphs = counter.frame_count
    with as_eager(reentrant):
        with blockcp.step(plan):
            out = checkpointed(fn, reentrant)(*leaves)
        out.sum().backward()
    return graphs


@pytest.mark.dist
@pytest.mark.parametrize("reentrant,graphs", [(True, 2), (False, 1)])  # with and without gradients
def test_a_checkpoint_around_a_compiled_function(reentrant, graphs, seed):
    assert run_ranks(2, around, seed, reentrant) == [graphs, graphs]


def inside(rank, world, seed, reentrant, with_plan):
    """A checkpoint inside a compiled function."""

    def layer(q, k, v):
        return blockcp.attention(q, k, v, plan).sin() if with_plan else attend(q, k, v)

    def model(q, k, v):
        return checkpoint(layer, q * 1, k, v, use_reentrant=reentrant) * 1

    fn, _ = compiled(model, fullgraph=False)
    for plan in plans(world, rank):
        leaves = inputs(plan, seed)
        want = wanted(plan, leaves)
        with blockcp.step(plan) as step:
            out = fn(*leaves)
            got = [out, *gradients(out, leaves)]
        close(got, want)
        assert step.calls == 2


@pytest.mark.dist
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("with_plan", [True, False])
def test_a_checkpoint_inside_a_compiled_function(reentrant, with_plan, seed):
    run_ranks(2, inside, seed, reentrant, with_plan)


def test_a_checkpoint_inside_one_graph_is_refused_while_tracing(seed):
    plan = next(plans(1, 0))
    fn, _ = compiled(checkpointed(attend, False))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="checkpoint"):
        with blockcp.step(plan):
            fn(*inputs(plan, seed))


def test_a_step_inside_a_compiled_function(seed):
    def train(plan, *leaves):
        with blockcp.step(plan) as step:
            out = attend(*(x * 1 for x in leaves))
            out.square().sum().backward()
        return out, step.calls

    fn, _ = compiled(train, fullgraph=False)
    for plan in plans(1, 0):
        leaves = inputs(plan, seed)
        want = wanted(plan, leaves)
        for x in leaves:
            x.grad = None
        out, calls = fn(plan, *leaves)
        close([out, *(x.grad for x in leaves)], want)
        assert calls == 1
