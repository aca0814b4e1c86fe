"""The cases of `script/bench kernels`: which there are, and how they are called."""

import dataclasses
import itertools

import packings

DIMS = (64, 128, 256, 512)
HEADS = ((8, 2), (8, 8))
DTYPES = ("fp32", "bf16")
WINDOWS = (None, 1024)
PASSES = ("forward", "backward")
FLOPS = {"forward": 4, "backward": 10}  # per visible pair, query head and column: two products, or five


@dataclasses.dataclass(frozen=True)
class Problem:
    """What forward and backward share."""

    packing: str = "long"
    dim: int = 128
    heads: tuple = (8, 2)
    dtype: str = "fp32"
    window: int | None = None

    @property
    def mask(self):
        return f"w{self.window}" if self.window else "causal"


@dataclasses.dataclass(frozen=True)
class Case:
    problem: Problem
    direction: str

    @property
    def name(self):
        p = self.problem
        return f"{p.packing}/d{p.dim}/h{p.heads[0]}-{p.heads[1]}/{p.dtype}/{self.direction}/{p.mask}"

    def flop(self, rows):
        """Useful work: masked pairs do not count."""
        p = self.problem
        visible = packings.pairs(packings.lengths(p.packing, rows), p.window)
        return FLOPS[self.direction] * p.heads[0] * p.dim * visible


def parse(name):
    """The case of a name, in the table or not. ValueError says what a name must look like."""
    try:
        packing, dim, heads, dtype, direction, mask = name.split("/")
        q_heads, kv_heads = (int(n) for n in heads.removeprefix("h").split("-"))
        window = None if mask == "causal" else int(mask.removeprefix("w"))
        case = Case(Problem(packing, int(dim.removeprefix("d")), (q_heads, kv_heads), dtype, window), direction)
        sizes = (case.problem.dim, q_heads, kv_heads, 1 if window is None else window)
        known = packing in packings.NAMES and dtype in DTYPES and direction in PASSES
        if known and min(sizes) >= 1 and q_heads % kv_heads == 0 and case.name == name:
            return case
    except ValueError:
        pass
    raise ValueError(
        f"[bench] a case must be named packing/dD/hHq-Hkv/dtype/pass/mask, but is '{name}'. "
        f"As in {Case(Problem(), 'forward').name}, with a packing of {', '.join(packings.NAMES)}, fp32 or bf16, "
        "forward or backward, and causal or a window such as w1024."
    )


def with_passes(problems):
    return [Case(problem, direction) for problem in problems for direction in PASSES]


def full():
    axes = itertools.product(packings.NAMES, WINDOWS, HEADS, DTYPES, DIMS)
    return with_passes(Problem(packing, dim, heads, dtype, window) for packing, window, heads, dtype, dim in axes)


ONE_KV_HEAD = Problem("one", heads=(4, 1))  # groups of 4 as in 8/2, so that only the number of KV heads differs


def quick():
    """The cases that targets speak of, and no others; the longest come last."""
    short = ("gsm8k", "code", "book")
    return with_passes(
        [
            *(Problem(packing, dtype=dtype) for packing in short for dtype in DTYPES),
            Problem("pretraining"),
            *(Problem("long", dtype=dtype) for dtype in DTYPES),
            Problem("long", dim=64),
            Problem("long", heads=(8, 8)),
            Problem("one", window=1024),
            Problem("one"),
            ONE_KV_HEAD,
            Problem("long", dim=256),
            Problem("long", dim=512),
        ]
    )
