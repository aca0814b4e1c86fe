"""Random problems on 1 to 5 ranks: every path against the oracle, forward and backward."""

import random

import dense
import problems
import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_random_problems_agree_with_the_oracle(world):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    compared = run_ranks(world, problems.check_many, world and seed, 60 if world < 4 else 40)
    assert len(set(compared)) == 1 and compared[0] > 100


# Partial results are merged by an lse of 16, whose last fp32 bit is 2e-6 of a weight.
def test_the_merge_of_large_scores():
    run_ranks(5, problems.check, problems.random_problem(1091085753, 5))


def share_without_a_key(seed, dtype):
    problem = problems.random_problem(seed, 5, dtype)
    whole = problems.tensors(problem)
    seen = dense.visible(problem["ids"], **problem["mask"])
    exact = dense.gradients(*whole, seen, problem["scale"])
    allowed = problems.allowed_errors(problem, 5, exact, whole, seen)
    batch, row = (random.Random(seed).randrange(n) for n in seen.shape[:2])
    weights = dense.weights(*whole[:2], seen, problem["scale"])[batch, 0, row]
    keys = ((weights > 0.01) & (weights < 0.99)).nonzero()[:, 0].tolist()
    if not keys:
        return None
    seen[batch, row, random.Random(seed).choice(keys)] = False
    wrong = dense.gradients(*whole, seen, problem["scale"])
    return [problems.error(w, e, a) for w, e, a in zip(wrong, exact, allowed)]


def shares_without_a_key(rank, world, seed, count, dtype):
    """What a lost key of some weight changes in out, lse, dq, dk and dv, in units of what is allowed, for every problem
    whose chosen row has such a key."""
    return [share for share in (share_without_a_key(seed + i, dtype) for i in range(count)) if share]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_lost_key_is_far_beyond_what_is_allowed(dtype):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    (shares,) = run_ranks(1, shares_without_a_key, seed, 100, dtype)
    assert len(shares) > 20
    # -log(1 - p) > p = 0.01, where lse may be off by less than 1000 roundings of 2^-24
    assert min(lse for _, lse, *_ in shares) > 0.01 / (1000 * 2**-24)
    medians = [sorted(result)[len(shares) // 2] for result in zip(*shares)]
    print(f"medians {medians}")
    assert dtype.itemsize == 2 or min(medians) > 100
