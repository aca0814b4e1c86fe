"""Reported cases about masks, numbers and shapes, by id."""

import math

import pytest
import torch
import torch.nn.functional as F
from probe import expect, expect_oracle, ids_of, on_all_paths
from problems import PATHS, attend, check, tensors
from ranks import run_ranks

import blockcp

pytestmark = pytest.mark.dist


def problem(ids, **changes):
    base = {
        "seed": 7,
        "ids": torch.tensor(ids).reshape(1, -1) if not isinstance(ids[0], list) else torch.tensor(ids),
        "mask": {},
        "heads": (4, 2),
        "dims": (16, 16),
        "dtype": torch.float32,
        "scale": None,
        "format": "bhld",
        "kernel": None,
        "grads": 7,
    }
    return {**base, **changes}


def test_KN_01_queries_are_a_suffix_of_their_keys():
    ids = ids_of([6, 2])
    results = on_all_paths(2, ids)
    assert set(results) == set(PATHS)
    expect(results, "0 .5 1 1.5 | 2 2.5 6 6.5")


def test_KN_02_ways_to_say_unbounded():
    ids = ids_of([3, 5])
    unbounded = [on_all_paths(2, ids, {"window": w}) for w in (None, -1, (-1, 0), (None, 0), 8, 80)]
    for results in unbounded:
        expect(results, "0 .5 1 3 | 3.5 4 4.5 5")
        for path, tensors_of_path in results.items():
            for got, want in zip(tensors_of_path[:1], unbounded[0][path][:1]):
                assert torch.equal(got, want)
    for window in (0, -2, (4, -3), (3, 2)):
        with pytest.raises(ValueError, match="window"):
            blockcp.plan(lengths=[3, 5], masks={"m": blockcp.Mask(window=window)})


def test_KN_03_the_window_counts_the_row_itself():
    ids = ids_of([12])
    expect(on_all_paths(3, ids, {"window": 4}), "0 .5 1 1.5 | 2.5 3.5 4.5 5.5 | 6.5 7.5 8.5 9.5")
    expect(on_all_paths(3, ids, {"window": (3, 0)}), "0 .5 1 1.5 | 2.5 3.5 4.5 5.5 | 6.5 7.5 8.5 9.5")
    for out, *_ in on_all_paths(3, ids, {"window": 1}).values():
        assert torch.equal(out[0, 0, :, 0], torch.arange(12.0))


def test_KN_04_window_longer_than_a_shard():
    ids = ids_of([16])
    results = on_all_paths(4, ids, {"window": 6})
    assert set(results) == {"allgather", "a2a", "ring"}
    expect_oracle(results, ids, {"window": 6})
    for out, *_ in results.values():
        torch.testing.assert_close(out[0, 0, 12:, 0], torch.tensor([9.5, 10.5, 11.5, 12.5]))
    plan = blockcp.plan(doc_ids=ids, world_size=4, rank=0, masks={"m": blockcp.Mask(window=6)})
    assert plan.kv()["recv"] == [0, 4, 5, 5] and not plan.kv()["use_halo"]


@pytest.mark.parametrize("window", [5, 8, 100])
def test_KN_05_window_longer_than_text(window):
    expect(on_all_paths(2, ids_of([3, 5]), {"window": window}), "0 .5 1 3 | 3.5 4 4.5 5")


def ring_and_allgather(rank, world, ids):
    case = problem(ids)
    whole = tensors(case)
    return [
        max((a - b).abs().max().item() for a, b in zip(*(attend(case, path, rank, world, whole) for path in pair)))
        for pair in (("ring", "allgather"), ("a2a", "allgather"))
    ]


def test_KN_10_partial_results_merge_in_natural_logarithms():
    ids = ids_of([64])
    assert max(max(off) for off in run_ranks(8, ring_and_allgather, ids)) < 1e-5
    for _, lse, *_ in on_all_paths(8, ids).values():
        assert lse[0, 0, 63].item() == pytest.approx(4.158883, abs=1e-5)


@pytest.mark.parametrize("lengths,pad,world", [([4, 4, 4, 4], 0, 4), ([4], 12, 4), ([2, 9, 1], 0, 3)])
def test_KN_11_hops_in_which_nothing_is_visible(lengths, pad, world):
    ids = ids_of(lengths, pad)
    results = on_all_paths(world, ids)
    expect_oracle(results, ids, pads=range(sum(lengths), len(ids)))
    if lengths == [4, 4, 4, 4]:
        expect(results, "0 .5 1 1.5 | 4 4.5 5 5.5 | 8 8.5 9 9.5 | 12 12.5 13 13.5")
        alone = blockcp.plan(doc_ids=ids)
        v = torch.arange(16.0).reshape(1, 1, 16, 1).expand(1, 2, 16, 16)
        local = blockcp.attention(torch.zeros(1, 4, 16, 16), torch.zeros(1, 2, 16, 16), v, alone)
        assert all(torch.equal(out, local) for out, *_ in results.values())


@pytest.mark.parametrize("scale", [1.0, 0.125, 0.05, None])
def test_KN_13_the_scale_reaches_every_path(scale):
    assert run_ranks(4, check, problem(ids_of([7, 9]), dims=(64, 64), scale=scale)) == [3] * 4


def through_sdpa(rank, world, scale):
    case = problem(ids_of([7, 9]), dims=(64, 64), scale=scale)
    q, k, v, _ = (x[:, :, 4 * rank : 4 * rank + 4] for x in tensors(case))
    plan = blockcp.plan(doc_ids=case["ids"], world_size=world, rank=rank)
    with blockcp.step(plan):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    assert torch.equal(out, blockcp.attention(q, k, v, plan, scale=scale))
    return out


def test_KN_13_the_scale_reaches_the_drop_in():
    none, eighth, one = (run_ranks(4, through_sdpa, scale) for scale in (None, 0.125, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(none, eighth))
    assert max((a - b).abs().max().item() for a, b in zip(none, one)) > 0.1


@pytest.mark.parametrize("hq,hkv", [(6, 2), (8, 2), (7, 1), (5, 5), (12, 3)])
def test_KN_14_query_heads_read_their_own_kv_head(hq, hkv):
    ids = ids_of([3, 5])
    results = expect_oracle(on_all_paths(2, ids, heads=(hq, hkv)), ids, group=hq // hkv)
    for out, _, _, dk, dv in results.values():
        assert dk.shape[1] == dv.shape[1] == hkv and out.shape[1] == hq
    outs = run_ranks(2, heads_probe, hq, hkv)
    want = torch.arange(1.0, hkv + 1).repeat_interleave(hq // hkv)
    for out in outs:
        torch.testing.assert_close(out, want[:, None].expand(hq, out.shape[1]))


def heads_probe(rank, world, hq, hkv):
    plan = blockcp.plan(lengths=[3, 5], world_size=world, rank=rank)
    v = torch.arange(1.0, hkv + 1).reshape(1, hkv, 1, 1).expand(1, hkv, 4, 16)
    return blockcp.attention(torch.randn(1, hq, 4, 16), torch.randn(1, hkv, 4, 16), v, plan)[0, :, :, 0]


def test_KN_15_adjacent_images_do_not_see_each_other():
    mask = {"spans": [0, 1, 1, 1, 2, 2, 2, 0]}
    expect(
        on_all_paths(2, ids_of([8]), mask),
        "0 1.5 1.5 1.5 | 3 3 3 3.5",
        "2.303571 1.303571 1.303571 1.303571 | .553571 .553571 .553571 .125",
    )


def test_KN_17_a_span_is_cut_at_the_document():
    expect(on_all_paths(2, ids_of([4, 4]), {"spans": [0, 0, 1, 1, 1, 1, 0, 0]}), "0 .5 1.5 1.5 | 4.5 4.5 5 5.5")


def test_KN_18_span_longer_than_the_window():
    spans = [0, 1, 1, 1, 1, 1, 1, 0]
    ids = ids_of([8])
    expect(on_all_paths(2, ids, {"window": 3, "spans": spans}), "0 3 3 3.5 | 4 4.5 5 6")
    both = {"window": 3, "spans": spans, "span_window": "both"}
    expect(on_all_paths(2, ids, both), "0 1.5 2 3 | 4 4.5 5 6")
    expect(on_all_paths(2, ids, {"window": 3}), "0 .5 1 2 | 3 4 5 6")
    uncut = {"window": 3, "spans": spans, "span_window": "none"}
    expect_oracle(on_all_paths(2, ids, uncut), ids, uncut)


def layers_of_one_plan(rank, world):
    spans = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0])
    masks = {"image": blockcp.Mask(window=3, spans=spans), "text": blockcp.Mask(window=3)}
    plan = blockcp.plan(lengths=[8], world_size=world, rank=rank, masks=masks)
    q, k = torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 4, 4)
    v = torch.arange(4.0 * rank, 4 * rank + 4).reshape(1, 1, 4, 1).expand(1, 1, 4, 4)
    return [blockcp.attention(q, k, v, plan, mask=name)[0, 0, :, 0].tolist() for name in ("image", "text")]


def test_KN_18_spans_are_a_property_of_the_layer():
    first, second = run_ranks(2, layers_of_one_plan)
    assert first[0] + second[0] == pytest.approx([0, 3, 3, 3.5, 4, 4.5, 5, 6])
    assert first[1] + second[1] == pytest.approx([0, 0.5, 1, 2, 3, 4, 5, 6])


def layouts(rank, world):
    plan = blockcp.plan(lengths=[6, 2], world_size=world, rank=rank)
    q, k, v = (torch.randn(1, 4, 4, 8) for _ in range(3))  # as many heads as rows
    heads_first = blockcp.attention(q, k, v, plan)
    rows_first = blockcp.attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), plan, format="blhd")
    assert torch.equal(heads_first, rows_first.transpose(1, 2))
    assert heads_first.is_contiguous()
    other = blockcp.attention(q, k, v, plan, format="blhd")  # as told, not as sizes suggest
    assert not torch.equal(other, heads_first)
    with pytest.raises(ValueError, match="format"):
        blockcp.attention(q, k, v, plan, format="sbhd")


def test_KE_08_the_layout_is_never_guessed():
    run_ranks(2, layouts)


def check_widths(rank, world, dims):
    return check(rank, world, problem(ids_of([6, 5, 4], 1), dims=dims))


@pytest.mark.parametrize("dims", [(16, 32), (32, 16), (1, 5)])
def test_KE_11_values_of_another_width(dims):
    assert run_ranks(2, check_widths, dims) == [4, 4]


def strided_gradients(rank, world):
    """Losses whose gradients are broadcast, transposed, sliced or flipped, against the same made contiguous."""
    w = torch.randn(8 * 4, 3)
    losses = (
        lambda out: out.sum(),
        lambda out: out.transpose(1, 2).reshape(*out.shape[::2], -1).matmul(w).sum(),
        lambda out: out[..., ::2].sum(),
        lambda out: (out * out.flip(2)).sum(),
    )
    for path in PATHS:
        plan = blockcp.plan(lengths=[3, 5], world_size=world, rank=rank, exchange=path)
        q, k, v = (torch.randn(1, h, 4, 8, requires_grad=True) for h in (4, 2, 2))
        for loss in losses:
            grads = torch.autograd.grad(loss(blockcp.attention(q, k, v, plan)), (q, k, v))
            out = blockcp.attention(q, k, v, plan)
            leaf = out.detach().requires_grad_()
            (dout,) = torch.autograd.grad(loss(leaf), leaf)
            again = torch.autograd.grad(out, (q, k, v), dout.contiguous().clone())
            assert all(torch.equal(a, b) for a, b in zip(grads, again))


def padded_tail(rank, world, pad, paths):
    """``{path: (out, dq, dk, dv, share of dW)}`` of this rank; padding rows of the inputs are NaN."""
    lengths, heads = [144, 288, 512], (4, 2, 2, 4)
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(1, h, sum(lengths), 16, generator=generator) for h in heads]
    inputs = torch.randn(sum(lengths), 8, generator=generator)
    results = {}
    for path in paths:
        plan = blockcp.plan(lengths=lengths, rows=sum(lengths) + pad, world_size=world, rank=rank, exchange=path)
        rows = slice(rank * plan.local_rows, (rank + 1) * plan.local_rows)
        q, k, v, dout = (F.pad(x, (0, 0, 0, pad), value=math.nan)[:, :, rows].clone() for x in whole)
        x = F.pad(inputs, (0, 0, 0, pad))[rows]
        for tensor in (q, k, v):
            tensor.requires_grad_()
        torch.full((1 << 20,), math.nan)  # the allocator hands this memory out again
        out = blockcp.attention(q, k, v, plan)
        out.backward(dout)
        results[path] = (out.detach(), q.grad, k.grad, v.grad, k.grad[0, 0].T @ x)
    return results


def test_KE_04_rows_behind_the_last_document_get_zeros():
    paths = ("allgather", "a2a", "ring")
    padded, plain = (run_ranks(4, padded_tail, pad, paths) for pad in (80, 0))
    for path in paths:
        for i in range(4):
            tensor = torch.cat([of_rank[path][i] for of_rank in padded], 2)
            assert tensor.shape[2] == 1024 and (tensor[:, :, 944:] == 0).all(), path
            assert tensor.isfinite().all()
        weight, wanted = (sum(of_rank[path][4] for of_rank in run) for run in (padded, plain))
        torch.testing.assert_close(weight, wanted)


def test_KE_06_gradients_of_any_strides():
    run_ranks(2, strided_gradients)


def odd_strides(rank, world):
    case = problem(ids_of([6, 5, 4], 1))
    q, k, v, dout = (x[:, :, 8 * rank : 8 * rank + 8].contiguous() for x in tensors(case))
    plan = blockcp.plan(doc_ids=case["ids"], world_size=world, rank=rank)

    def run(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = blockcp.attention(*leaves, plan)
        return out, *torch.autograd.grad(out, leaves, dout)

    plain = run(q, k, v)
    wide = torch.full((1, 4, 8, 40), math.nan)
    wide[..., 3:35:2] = q
    for variant in (
        (wide[..., 3:35:2], k.transpose(1, 2).contiguous().transpose(1, 2), v.flip(2).contiguous().flip(2)),
        (q.transpose(-1, -2).contiguous().transpose(-1, -2), torch.stack([k, v])[0], torch.stack([k, v])[1]),
        (q, *torch.cat([k, v], 1).chunk(2, 1)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(run(*variant), plain))


def test_inputs_of_any_strides_give_the_same_bits():
    run_ranks(2, odd_strides)
