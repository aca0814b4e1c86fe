"""The probe with closed-form answers: q = 0, v_j = j, dout = 1, so that out_i is the mean of the rows that i sees."""

from __future__ import annotations

import dense
import torch
from problems import PATHS
from ranks import run_ranks

import blockcp

HEADS, DIM = (4, 2), 16


def ids_of(lengths, pad=0) -> list[int]:
    return [number for number, length in enumerate(lengths, 1) for _ in range(length)] + [0] * pad


def probe(rank, world, ids, mask, paths, heads, values, dout):
    """``{path: (out, lse, dq, dk, dv) of this rank, or the refusal}``."""
    ids = torch.tensor(ids)
    ids = ids if ids.dim() == 2 else ids[None]
    results = {}
    for path in paths:
        try:
            plan = blockcp.plan(
                doc_ids=ids, world_size=world, rank=rank, masks={"m": blockcp.Mask(**mask)}, exchange=path
            )
        except ValueError as error:
            results[path] = str(error)
            continue
        rows = slice(rank * plan.local_rows, (rank + 1) * plan.local_rows)
        batch, local = ids.shape[0], plan.local_rows
        v = torch.tensor(values, dtype=torch.float32) if values else torch.arange(float(ids.shape[1]))
        v = v.expand(batch, ids.shape[1])[:, None, rows, None].expand(batch, heads[1], local, DIM)
        v = v.clone().requires_grad_()
        q = torch.zeros(batch, heads[0], local, DIM, requires_grad=True)
        k = torch.randn(batch, heads[1], local, DIM).requires_grad_()
        out, lse = blockcp.attention(q, k, v, plan, return_lse=True)
        out.backward(torch.full_like(out, dout[rank] if dout else 1.0))
        results[path] = tuple(x.detach() for x in (out, lse, q.grad, k.grad, v.grad))
    return results


def on_all_paths(world, ids, mask=None, paths=PATHS, heads=HEADS, values=None, dout=None, fresh=False):
    """``{path: (out, lse, dq, dk, dv) over all ranks}`` of the admitted paths; every rank admits the same."""
    per_rank = run_ranks(world, probe, ids, mask or {}, paths, heads, values, dout, fresh=fresh)
    results = {}
    for path in paths:
        refused = [isinstance(of_rank[path], str) for of_rank in per_rank]
        assert len(set(refused)) == 1, (path, per_rank)
        if refused[0]:
            assert path == "halo", per_rank[0][path]
            continue
        results[path] = tuple(torch.cat([of_rank[path][i] for of_rank in per_rank], 2) for i in range(5))
    return results


def numbers(text: str) -> list[float]:
    """ "0 .5 | 1" -> [0, 0.5, 1]"""
    return [float(word) for word in text.replace("|", " ").split()]


def expect(results, out=None, dv=None, pads=(), batch=0, group=2):
    """The exact rows on every path; dv as for one query head a KV head, which ``group`` query heads multiply."""
    assert results
    for path, (got, lse, dq, dk, got_dv) in results.items():
        rows = got.shape[2]
        for want, seen, factor in ((out, got, 1), (dv, got_dv, group)):
            if want is not None:
                want = torch.tensor(numbers(want) if isinstance(want, str) else want) * factor
                assert len(want) == rows, (len(want), rows)
                want = want[:, None].expand(rows, DIM)
                for head in seen[batch]:
                    torch.testing.assert_close(
                        head, want, rtol=1e-5, atol=1e-6 * rows, msg=lambda m, p=path: f"{p}: {m}"
                    )
        assert (dk.abs() < 1e-5 * max(1, rows)).all() if dk.isfinite().all() else False, path
        assert dq.isfinite().all()
        for row in pads:
            for tensor in (got, dq, dk, got_dv):
                assert (tensor[batch, :, row] == 0).all(), (path, row)
            assert (lse[batch, :, row] == -torch.inf).all(), (path, row)


def expect_oracle(results, ids, mask=None, pads=(), group=2):
    """Every path against the means over the oracle's visible rows."""
    seen = dense.visible(ids, **(mask or {})).double()
    count = seen.sum(-1)
    rows = torch.arange(float(seen.shape[-1]), dtype=torch.float64)
    out = (seen @ rows) / count.clamp_min(1)
    dv = (seen / count.clamp_min(1)[..., None]).sum(1)
    for b in range(seen.shape[0]):
        expect(results, out[b].float().tolist(), dv[b].float().tolist(), pads=pads, batch=b, group=group)
    return results
