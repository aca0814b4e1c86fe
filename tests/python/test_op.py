"""The attention op and torch's machinery: checks, compilers, checkpointing, hooks, lifetimes."""

import copy
import gc
import itertools

import pytest
import torch
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import blockcp

OPS = torch.ops.blockcp


def one_rank(dtype=torch.float64, **changes):
    plan = blockcp.plan(lengths=[3, 2], rows=6, **changes)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 6, 4, dtype=dtype, generator=generator, requires_grad=True) for h in (4, 2, 2))
    return plan, q, k, v


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_gradcheck(kernel):
    plan, q, k, v = one_rank()
    assert torch.autograd.gradcheck(lambda *x: blockcp.attention(*x, plan, kernel=kernel), (q, k, v))


def test_opcheck():
    plan, q, k, v = one_rank(torch.float32)
    out, lse = OPS.attention(q, k, v, plan.handle)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in ((q, k, v, plan.handle), (q.detach(), k.detach(), v.detach(), plan.handle, "full", "", 0.5)):
        assert set(torch.library.opcheck(OPS.attention.default, args, test_utils=tests).values()) == {"SUCCESS"}
    saved = [x.detach() for x in (q, k, v, out, lse)]
    args = (torch.randn_like(out), *saved, plan.handle, "", "", None, "", True, 7)
    assert set(torch.library.opcheck(OPS.attention_backward.default, args, test_utils=tests).values()) == {"SUCCESS"}
    x = torch.randn(2, 4, 3, requires_grad=True)
    args = (x, torch.tensor([3, 0, 0]), "", [3], [3], 1)
    assert set(torch.library.opcheck(OPS.move_rows.default, args, test_utils=tests).values()) == {"SUCCESS"}


def loss_of(plan):
    return lambda q, k, v: blockcp.attention(q, k, v, plan).square().sum()


def test_compiles_into_one_graph():
    plan, q, k, v = one_rank(torch.float32)
    want = torch.autograd.grad(loss_of(plan)(q, k, v), (q, k, v))
    compiled = torch.compile(loss_of(plan), fullgraph=True, backend="aot_eager")
    for got, expected in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), want):
        torch.testing.assert_close(got, expected)


def test_a_new_plan_is_no_recompilation():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, handle: OPS.attention(q, q, q, handle)[0].sum(), fullgraph=True, backend=counter)
    for lengths in ([6], [3, 3], [1, 5]):
        plan = blockcp.plan(lengths=lengths)
        q = torch.randn(1, 2, 6, 4)
        torch.testing.assert_close(compiled(q, plan.handle), blockcp.attention(q, q, q, plan).sum())
    assert counter.frame_count == 1


def test_compilers_keep_calls_whose_results_nobody_uses():
    plan, q, k, v = one_rank(torch.float32)

    def ignoring(q):
        blockcp.attention(q, k.detach(), v.detach(), plan, scale=-1.0, kernel="nope")
        return q + 1

    with pytest.raises(Exception, match="nope"):
        torch.compile(ignoring, fullgraph=True, backend="aot_eager")(q.detach())


def compiled_in_step(rank, world):
    """A compiled call, given the group as an object, is counted in its step."""
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    attend = torch.compile(
        lambda x: blockcp.attention(x, x, x, plan, group=torch.distributed.group.WORLD), backend="aot_eager"
    )
    with blockcp.step(plan) as step:
        attend(q).sum().backward()
    return step.calls


@pytest.mark.dist
def test_compiled_calls_take_a_group_object_and_are_counted():
    assert run_ranks(2, compiled_in_step) == [1, 1]


def compiled_on_ranks(rank, world):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    name = torch.distributed.group.WORLD.group_name
    q, k, v = (torch.randn(1, h, 4, 8, requires_grad=True) for h in (4, 2, 2))

    def loss(q, k, v):
        return blockcp.attention(q, k, v, plan, group=name).square().sum()

    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.dist
def test_compiles_on_ranks():
    run_ranks(2, compiled_on_ranks)


def exchanges_compiled_on_ranks(rank, world):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    group, splits = torch.distributed.group.WORLD, plan.needed_splits()
    calls = (
        lambda x: blockcp.exchange.all_gather(x, group),
        lambda x: blockcp.exchange.left_halo(x, group, 2),
        lambda x: blockcp.exchange.needed_rows(x, group, *splits),
        lambda x: blockcp.unshard(x, plan, group),
    )
    x = torch.randn(1, 4, 3, requires_grad=True)
    for call in calls:
        want = call(x)
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(got, want)
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (want, got))
        assert torch.equal(a, b)


@pytest.mark.dist
def test_exchanges_compile_on_ranks():
    run_ranks(2, exchanges_compiled_on_ranks)


def checkpointed(rank, world):
    plan = blockcp.plan(lengths=[3 * world, world], world_size=world, rank=rank)
    q, k, v = (torch.randn(1, h, 4, 8, requires_grad=True) for h in (4, 2, 2))
    want = torch.autograd.grad(loss_of(plan)(q, k, v), (q, k, v))
    for reentrant in (True, False):
        for x in (q, k, v):
            x.grad = None
        checkpoint(loss_of(plan), q, k, v, use_reentrant=reentrant).backward()
        assert all(torch.equal(x.grad, w) for x, w in zip((q, k, v), want))


@pytest.mark.dist
def test_checkpointing_of_both_kinds():
    run_ranks(1, checkpointed)
    run_ranks(2, checkpointed)


def test_saved_tensor_hooks_see_what_is_saved():
    plan, q, k, v = one_rank(torch.float32)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.clone(), lambda x: x):
        out = blockcp.attention(q, k, v, plan)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert packed[:5] == [q.shape, k.shape, v.shape, out.shape, out.shape[:3]]
    assert all(torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(loss_of(plan)(q, k, v), (q, k, v))))


def test_double_backward_is_refused():
    plan, q, k, v = one_rank(torch.float32)
    (dq,) = torch.autograd.grad(loss_of(plan)(q, k, v), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def calls_of_one_rank():
    plan = blockcp.plan(lengths=[3, 2], rows=6)
    return {
        "attention": (lambda x: blockcp.attention(x, x, x, plan), (1, 2, 6, 4)),
        "varlen": (lambda x: blockcp.varlen(x, x, x, [0, 6], [0, 6]), (6, 2, 4)),
        "exchange": (lambda x: blockcp.exchange.all_gather(x), (6, 4)),
    }


@pytest.mark.parametrize("name", ["attention", "varlen", "exchange"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(name, requires_grad):
    call, shape = calls_of_one_rank()[name]
    x = torch.randn(shape, requires_grad=requires_grad)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(ValueError, match="forward-mode"):
        torch.func.jvp(call, (x.detach(),), (torch.ones(shape),))


def test_tensors_on_another_device_are_refused_by_every_op():
    plan, q, k, v = (x.detach() if isinstance(x, torch.Tensor) else x for x in one_rank(torch.float32))
    out, lse = OPS.attention(q, k, v, plan.handle)
    end = (plan.handle, "", "", None, "", True, 7)
    for i in range(6):
        given = [x.to("meta") if j == i else x for j, x in enumerate((out, q, k, v, out, lse))]
        with pytest.raises(ValueError, match=r"must be.*meta"):
            OPS.attention_backward(*given, *end)
    for i in range(3):
        with pytest.raises(ValueError, match=r"must be on the CPU.*meta"):
            OPS.attention(*(x.to("meta") if j == i else x for j, x in enumerate((q, k, v))), plan.handle)
    x, offsets = torch.randn(6, 2, 4), torch.tensor([0, 6])
    out, lse = OPS.varlen(x, x, x, offsets, offsets)
    for i in range(6):
        given = [x.to("meta") if j == i else x for j, x in enumerate((out, x, x, x, out, lse))]
        with pytest.raises(ValueError, match=r"must be.*meta"):
            OPS.varlen_backward(*given, offsets, offsets, False, [], None, "")
    with pytest.raises(RuntimeError, match="meta"):
        OPS.move_rows(x, torch.tensor([0], device="meta"), "", [1], [1], 0)


def test_a_group_that_torch_does_not_know():
    plan, q, k, v = one_rank(torch.float32)
    with pytest.raises(ValueError, match='none has the name "nope"'):
        blockcp.attention(q, k, v, plan, group="nope")


def test_one_rank_may_ask_for_shapes_alone():
    for call, shape in calls_of_one_rank().values():
        x = torch.empty(shape, device="meta")
        assert call(x).shape == x.shape and call(x).is_meta


def test_lse_has_no_gradient():
    plan, q, k, v = one_rank()
    out, lse = blockcp.attention(q, k, v, plan, return_lse=True)
    assert out.requires_grad and not lse.requires_grad and lse.dtype == torch.float64
    assert lse[0, 0, 5] == -torch.inf


def test_the_plan_may_go_before_the_backward():
    gc.collect()
    before = OPS.plan_count()
    plan, q, k, v = one_rank(torch.float32)
    loss = loss_of(plan)(q, k, v)
    del plan
    gc.collect()
    assert OPS.plan_count() == before + 1
    loss.backward()
    assert q.grad is not None
    del loss
    gc.collect()
    assert OPS.plan_count() == before


def test_no_grad_saves_nothing():
    plan, q, k, v = one_rank(torch.float32)
    with torch.no_grad():
        assert blockcp.attention(q, k, v, plan).grad_fn is None
    with torch.inference_mode():
        blockcp.attention(q.detach(), k.detach(), v.detach(), plan)


def test_meta_tensors_have_the_right_shapes():
    plan = blockcp.plan(lengths=[8])
    q, k, v = (torch.empty(2, h, 8, d, device="meta", dtype=torch.bfloat16) for h, d in ((4, 16), (2, 16), (2, 24)))
    out, lse = OPS.attention(q, k, v, plan.handle)
    assert out.shape == (2, 4, 8, 24) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 8) and lse.dtype == torch.float32


def test_padding_keeps_the_graph():
    plan = blockcp.plan(doc_ids=[0, 0, 0])
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    out = blockcp.attention(q, q, q, plan)
    assert out.grad_fn is not None and not out.any()
    out.sum().backward()
    assert q.grad.shape == q.shape and not q.grad.any()


def test_copies_share_the_plan():
    plan = blockcp.plan(lengths=[3])
    assert copy.copy(plan) is plan and copy.deepcopy([plan])[0] is plan


def test_threads_do_not_change_bits():
    plan = blockcp.plan(lengths=[40, 25], rows=70)
    q, k, v = (torch.randn(1, h, 70, 16, requires_grad=True) for h in (4, 2, 2))
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = blockcp.attention(q, k, v, plan)
            seen.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    finally:
        torch.set_num_threads(threads)
    for a, b in itertools.pairwise(seen):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_backward_wants_what_forward_returned():
    plan, q, k, v = (x.detach() if isinstance(x, torch.Tensor) else x for x in one_rank(torch.float32))
    out, lse = OPS.attention(q, k, v, plan.handle)
    end = (plan.handle, "", "", None, "", True, 7)
    for given, words in (
        ((out, q, k, v, out[:, :2], lse), "out must be"),
        ((out, q, k, v, out, lse.double()), "lse must be"),
        ((out[..., :2], q, k, v, out, lse), "gradient of out"),
    ):
        with pytest.raises(ValueError, match=words):
            OPS.attention_backward(*given, *end)
