"""Random small problems, and the comparison of one with the oracle on every rank."""

from __future__ import annotations

import random

import dense
import torch

import blockcp

PATHS = ("allgather", "halo", "a2a", "ring")
NAMES = ("out", "lse", "dq", "dk", "dv")
GROUPS = ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (3, 1))


def random_ids(rng: random.Random, batch: int, rows: int) -> torch.Tensor:
    """Documents of random lengths and labels, with padding anywhere."""
    ids = torch.zeros(batch, rows, dtype=torch.int64)
    for b in range(batch):
        labels, row = rng.sample(range(1, 2**40), rows + 1), 0
        while row < rows:
            length = min(rows - row, rng.choice((1, 2, 3, 5, rows // 2 + 1, rows)))
            if rng.random() < 0.7:
                ids[b, row : row + length] = labels.pop()
            row += length
    return ids


def random_spans(rng: random.Random, batch: int, rows: int) -> torch.Tensor:
    spans = torch.zeros(batch, rows, dtype=torch.int64)
    for b in range(batch):
        row, number = 0, 1
        while row < rows:
            length = min(rows - row, rng.randint(1, 5))
            if rng.random() < 0.5:
                spans[b, row : row + length] = number
                number += 1
            row += length
    return spans


def random_mask(rng: random.Random, batch: int, rows: int) -> dict:
    causal = rng.random() < 0.7
    window = rng.choice((None, None, -1, 1, rng.randint(1, rows + 2), "pair"))
    if window == "pair":
        sides = (None, -1, 0, rng.randint(0, rows))
        window = (rng.choice(sides), 0 if causal else rng.choice(sides))
    mask = {"causal": causal, "window": window}
    if rng.random() < 0.3 and causal:
        mask |= {"spans": random_spans(rng, batch, rows), "span_window": rng.choice(("left", "both", "none"))}
    return mask


def random_problem(seed: int, world: int, dtype: torch.dtype | None = None) -> dict:
    rng = random.Random(seed)
    batch, local = rng.choice((1, 1, 2)), rng.randint(1, 9)
    rows = local * world
    return {
        "seed": seed,
        "ids": random_ids(rng, batch, rows),
        "mask": random_mask(rng, batch, rows),
        "heads": rng.choice(GROUPS),
        "dims": (rng.choice((1, 3, 8, 17, 32)), rng.choice((1, 4, 16, 33))),
        "dtype": dtype or rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        "scale": rng.choice((None, 1.0, 0.3)),
        "format": rng.choice(("bhld", "blhd")),
        "kernel": rng.choice((None, None, "reference")),
        "grads": rng.choice((7, 7, 7, 1, 2, 4, 6)),
    }


def tensors(problem: dict) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout of the whole batch, [B, H, S, D]."""
    generator = torch.Generator().manual_seed(problem["seed"])
    batch, rows = problem["ids"].shape
    (hq, hkv), (d, dv) = problem["heads"], problem["dims"]
    shapes = ((batch, hq, rows, d), (batch, hkv, rows, d), (batch, hkv, rows, dv), (batch, hq, rows, dv))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(problem["dtype"]) for s in shapes)


def attend(problem: dict, path: str, rank: int, world: int, whole, group=None) -> tuple[torch.Tensor, ...] | None:
    """This rank's out, lse, dq, dk, dv through the public interface; None where the plan does not admit ``path``."""
    try:
        plan = blockcp.plan(
            doc_ids=problem["ids"],
            world_size=world,
            rank=rank,
            masks={"m": blockcp.Mask(**problem["mask"])},
            exchange=path,
        )
    except ValueError as error:
        assert path == "halo" and "halo" in str(error), error
        return None
    assert path in (plan.choice["m"].path, "auto")
    heads_last = problem["format"] == "blhd"
    rows = slice(rank * plan.local_rows, (rank + 1) * plan.local_rows)
    local = [x[:, :, rows].transpose(1, 2).clone() if heads_last else x[:, :, rows].clone() for x in whole]
    q, k, v, dout = local
    for i, x in enumerate((q, k, v)):
        x.requires_grad_(bool(problem["grads"] >> i & 1))
    out, lse = blockcp.attention(
        q,
        k,
        v,
        plan,
        group=group,
        scale=problem["scale"],
        return_lse=True,
        format=problem["format"],
        kernel=problem["kernel"],
    )
    out.backward(dout)
    result = [out.detach(), q.grad, k.grad, v.grad]
    if heads_last:
        result = [None if x is None else x.transpose(1, 2) for x in result]
    return result[0], lse, *result[1:]


def allowed_errors(problem: dict, world: int, exact, whole, seen) -> list[torch.Tensor]:
    """How far each element may be from the fp64 oracle, u being the rounding unit of the sums:

    - twice the largest error of dense fp32 attention, which sums as many terms of the same size in another order;
    - for every element, u times the sum of its terms' sizes times a number of roundings, which is the sum of
      - 16, for exp, quotients and the sums over keys, columns, blocks and ranks;
      - (2 W + 2) A, where A is the largest |lse|. Rounding a score or an lse of size A changes it by up to u A, and a
        weight by that much relatively (a score far below the lse may be larger, but then its weight is the smaller:
        exp(s - lse) |s| < |lse| + 1). Each of at most W hops of ring rounds its own lse and the merged one; backward
        takes a score and an lse once more;
      - sqrt(D) T, where T is the largest sum of sizes of a score's D terms: it bounds the partial sums, whose D
        roundings add up like their root. Dense attention of few scores may be lucky with all of them;
    - for 16-bit inputs, the storage type's unit times the terms' sizes, once for each number that is rounded to it: P
      as an operand and the result in out and dv; out, P in it and dS as an operand and the result in dq and dk.
    """
    terms = dense.sizes_of_terms(*whole, seen, problem["scale"])
    if problem["dtype"] == torch.float64:
        return [1e-12 * size for size in terms]  # 9000 roundings
    plain = dense.gradients(*whole, seen, problem["scale"], dtype=torch.float32)
    lse = exact[1][exact[1].isfinite()].abs()
    roundings = 16 + (2 * world + 2) * (lse.max().item() if lse.numel() else 0.0)
    roundings += problem["dims"][0] ** 0.5 * dense.size_of_scores(*whole[:2], seen, problem["scale"])
    allowed = [2 * error(p, e) + roundings * 2**-24 * size for p, e, size in zip(plain, exact, terms)]
    if problem["dtype"] == torch.float32:
        return allowed
    info = torch.finfo(problem["dtype"])
    return [
        limit + times * info.eps / 2 * (size + info.smallest_normal)
        for limit, size, times in zip(allowed, terms, (2, 0, 4, 4, 2))
    ]


def error(got: torch.Tensor, exact: torch.Tensor, unit: float | torch.Tensor = 1.0) -> float:
    """The largest difference in units; infinite where one is not finite and the other is."""
    got = got.to(torch.float64)
    same = (got == exact) | (got - exact).isfinite()
    if not bool(same.all()):
        return float("inf")
    return torch.where(got == exact, 0.0, (got - exact) / unit).abs().max().item() if got.numel() else 0.0


def check(rank: int, world: int, problem: dict, paths=PATHS) -> int:
    """Compares every admitted path with the oracle; returns how many were. Raises only after the last call, so that no
    rank is left waiting."""
    compared, failures = 0, []
    whole = tensors(problem)
    seen = dense.visible(problem["ids"], **problem["mask"])
    exact = dense.gradients(*whole, seen, problem["scale"])
    allowed = allowed_errors(problem, world, exact, whole, seen)
    for path in paths:
        results = attend(problem, path, rank, world, whole)
        if results is not None:
            compared += 1
            failures += [
                f"path {path}, rank {rank}: {text}" for text in compare(problem, rank, world, results, exact, allowed)
            ]
    assert not failures, f"{failures} in {problem}"
    return compared


def compare(problem: dict, rank: int, world: int, results, exact, allowed) -> list[str]:
    """What is wrong with one rank's results."""
    local = problem["ids"].shape[1] // world
    rows = slice(rank * local, (rank + 1) * local)
    padding = (problem["ids"] == 0)[:, rows]
    wrong = []
    for name, got, want, limit in zip(NAMES, results, exact, allowed):
        if got is None:
            continue
        mine = want[:, :, rows]
        if got.shape != mine.shape:
            wrong.append(f"{name} has the shape {got.shape}, not {mine.shape}")
            continue
        off = error(got, mine, limit[:, :, rows])
        if off > 1:
            wrong.append(f"{name} is off by {off} times what is allowed")
        if bool((got.transpose(1, 2)[padding] != (-torch.inf if name == "lse" else 0)).any()):
            wrong.append(f"{name} of padding is not empty")
    return wrong


def check_many(rank: int, world: int, seed: int, count: int) -> int:
    compared, failures = 0, []
    for i in range(count):
        try:
            compared += check(rank, world, random_problem(seed + i, world))
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, "\n".join(failures)
    return compared
