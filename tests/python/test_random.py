"""Random problems on 1 to 5 ranks: every path against the oracle, forward and backward."""

import random

import problems
import pytest
from ranks import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_random_problems_agree_with_the_oracle(world):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    compared = run_ranks(world, problems.check_many, world and seed, 60 if world < 4 else 40)
    assert len(set(compared)) == 1 and compared[0] > 100
