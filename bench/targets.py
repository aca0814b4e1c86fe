"""What the kernels should reach, for 16384 rows on all threads, and what rows of a run say about that."""

import dataclasses

import table
from table import Case, Problem

ROWS = 16384
INSTRUCTIONS = ("AVX-512", "AVX2")  # others have no targets

# Share of the FMA peak, forward and backward: fp32, 8/2 heads, causal.
SHARES = (
    (("long",), (128, 256), {"AVX-512": (0.87, 0.87), "AVX2": (0.82, 0.83)}),
    (("long",), (64,), {"AVX-512": (0.84, 0.86), "AVX2": (0.80, 0.82)}),
    (("long",), (512,), {"AVX-512": (0.85, 0.82), "AVX2": (0.80, 0.74)}),
    (("book", "code", "pretraining"), (128,), {"AVX-512": (0.83, 0.83), "AVX2": (0.79, 0.79)}),
    (("gsm8k",), (128,), {"AVX-512": (0.58, 0.60), "AVX2": (0.55, 0.57)}),
)
# Speed over the best of torch's ways, forward and backward: D 128, 8/2 heads, causal.
RATIOS = (
    (("long", "book", "code", "pretraining"), "fp32", (1.3, 1.3)),
    (("gsm8k",), "fp32", (2.8, 2.5)),
    (("long", "book", "code"), "bf16", (2.5, 1.8)),  # only where the processor has bf16 dot products
    (("gsm8k",), "bf16", (3.0, 3.0)),
)
# Speed of bf16 over ours in fp32, forward and backward, with bf16 dot products and without.
OVER_FP32 = {"long": {True: (1.8, 1.75), False: (0.93, 0.90)}, "gsm8k": {True: (1.45, 1.45), False: (0.93, 0.90)}}
WINDOW_TIME = 1.2  # a window's share of the time over its share of the pairs
HEADS_MARGIN = 0.05  # what other numbers of heads may lose, in share of the peak


@dataclasses.dataclass
class Target:
    what: str
    case: Case
    needed: float
    seen: float | None  # None: not measured
    at_most: bool = False

    @property
    def met(self):
        if self.seen is None:
            return None
        return self.seen <= self.needed if self.at_most else self.seen >= self.needed

    @property
    def verdict(self):
        return {None: "not measured", True: "met", False: "missed"}[self.met]

    def __str__(self):
        seen = "     -" if self.seen is None else f"{self.seen:6.3f}"
        sign = "<=" if self.at_most else ">="
        return f"{self.what:34} {self.case.name:44} {seen} {sign} {self.needed:5.3f}  {self.verdict}"


def both(problem, needed):
    return [(Case(problem, direction), bound) for direction, bound in zip(table.PASSES, needed)]


def has_ratio(case):
    """Whether a target compares this case with torch."""
    p = case.problem
    listed = any(p.packing in names and p.dtype == dtype for names, dtype, _ in RATIOS)
    return listed and p == Problem(p.packing, dtype=p.dtype)


def targets(rows, instructions, bf16):
    """All targets of a processor with these instructions and bf16 dot products or not. `rows`: JSON rows by case."""

    def value(case, field):
        return rows.get(case.name, {}).get(field)

    def over(case, other, field="value"):
        a, b = value(case, field), value(other, field)
        return a / b if a and b else None

    found = []
    for names, dims, needed in SHARES:
        for problem in (Problem(name, dim) for name in names for dim in dims):
            for case, bound in both(problem, needed[instructions]):
                found.append(Target("share of the FMA peak", case, bound, value(case, "of_peak")))
    for names, dtype, needed in RATIOS:
        for problem in (Problem(name, dtype=dtype) for name in names if dtype == "fp32" or bf16):
            for case, bound in both(problem, needed):
                found.append(Target("over the best of torch", case, bound, value(case, "ratio")))
    for name, needed in OVER_FP32.items():
        for case, bound in both(Problem(name, dtype="bf16"), needed[bf16]):
            fp32 = Case(Problem(name), case.direction)
            found.append(Target("bf16 over our fp32", case, bound, over(case, fp32)))
    for case, bound in both(Problem("one", window=1024), (WINDOW_TIME, WINDOW_TIME)):
        whole = Case(Problem("one"), case.direction)
        # The time of a pair against the time of a pair: what speeds per useful pair are the inverse of.
        found.append(Target("time share over share of pairs", case, bound, over(whole, case), at_most=True))
    for problem, base in ((Problem("long", heads=(8, 8)), Problem("long")), (table.ONE_KV_HEAD, Problem("one"))):
        for case, bound in both(problem, (-HEADS_MARGIN, -HEADS_MARGIN)):
            a, b = value(case, "of_peak"), value(Case(base, case.direction), "of_peak")
            found.append(Target("share of the peak less that of 8/2", case, bound, a - b if a and b else None))
    return found
