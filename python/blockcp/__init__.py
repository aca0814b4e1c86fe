"""Training attention over packed documents in context parallelism.

Many documents lie end to end in one sequence, attention stays inside each, and the sequence is cut over the ranks of a
process group. ``plan`` says once per batch who holds which rows and how keys and values travel; ``attention`` runs it.
"""

from blockcp import exchange
from blockcp._build_info import VERSION as __version__
from blockcp.attention import attention
from blockcp.mask import Mask
from blockcp.plan import Choice, Plan, plan
from blockcp.sdpa import sdpa
from blockcp.shard import shard, unshard
from blockcp.step import Step as step
from blockcp.step import local
from blockcp.varlen import varlen

__all__ = [
    "Choice",
    "Mask",
    "Plan",
    "__version__",
    "attention",
    "exchange",
    "local",
    "plan",
    "sdpa",
    "shard",
    "step",
    "unshard",
    "varlen",
]
