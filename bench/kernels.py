"""Attention on one rank beside torch's, with the processor's FMA peak, in one process.

For every case, the median speed of blockcp, in GFLOP/s of useful work (4 Hq D for each visible pair of query and key
forward, 10 Hq D backward), the peak, the best of torch's ways and both ratios. docs/benchmarks.md says how it is
measured and what the columns mean.
"""

import argparse
import os
import sys
import time

import results
import table
import targets
import torch
import ways
from contest import Contest, status

import blockcp

EXAMPLES = """examples:
  script/bench kernels --quick --json out.json          the cases that targets speak of
  script/bench kernels --only gsm8k                     one packing, all of its cases
  script/bench kernels --quick --only /d128/ /bf16/     cases that contain one of these
  script/bench kernels --only long/d96/h4-4/fp32/forward/w100
                                                        a whole name is measured even if no table has it
"""
KINDS = {"fp32": ("fp32_avx512", "fp32_avx2", "fp32_neon", "scalar"), "bf16": ("bf16_avx512",)}
BUSY = 1.0  # load average from which other programs are likely to disturb


def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="script/bench kernels",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well, after each one")
    parser.add_argument("--quick", action="store_true", help="only the cases that targets speak of; under ten minutes")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only cases whose names contain one of these texts")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument(
        "--peers", nargs="*", choices=ways.PEERS, metavar="PEER", help=f"of {', '.join(ways.PEERS)} (default: all)"
    )
    parser.add_argument(
        "--repeat", type=results.positive, default=5, help="runs, of which the median counts (default: 5)"
    )
    parser.add_argument(
        "--rows", type=results.positive, default=targets.ROWS, help="rows in all (default: %(default)s)"
    )
    parser.add_argument("--threads", type=results.positive, help="default: one for each processor of this process")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(argv)


def chosen(options):
    """Cases to measure, in order. ValueError for texts that choose none."""
    cases = table.quick() if options.quick else table.full()
    if not options.only:
        return cases
    known = {case.name for case in cases}
    for text in options.only:
        if text.count("/") == 5 and text not in known:
            cases.append(table.parse(text))
        elif not any(text in name for name in known):
            raise ValueError(
                f"[bench] --only must name a part of a case, but '{text}' is in none of {len(known)} names, such as "
                f"{cases[0].name}. --list prints them all."
            )
    return [case for case in cases if any(text in case.name for text in options.only)]


class Peaks:
    """The most GFLOP/s of multiply-adds seen so far in this run, by type."""

    def __init__(self, threads):
        self.threads = threads
        self.best = {}
        self.kind = {}
        for dtype, kinds in KINDS.items():
            here = (kind for kind in kinds if torch.ops.blockcp._fma_peak(1, kind) > 0)
            self.kind[dtype] = next(here, None)
        for _ in range(10):
            self.measure()

    def measure(self):
        for dtype, kind in self.kind.items():
            if kind:
                self.best[dtype] = max(self.best.get(dtype, 0), torch.ops.blockcp._fma_peak(self.threads, kind))

    def of(self, dtype):
        return self.best.get(dtype, self.best["fp32"])

    @property
    def bf16(self):
        return "bf16" in self.best

    @property
    def instructions(self):
        names = {"fp32_avx512": "AVX-512", "fp32_avx2": "AVX2", "fp32_neon": "NEON", "scalar": "no vectors"}
        return names[self.kind["fp32"]]

    def __str__(self):
        bf16 = f", {self.best['bf16']:.0f} bf16" if self.bf16 else ""
        return f"FMA peak {self.best['fp32']:.0f} GFLOP/s fp32{bf16} ({self.instructions})"


def peers_of(case, options):
    """Who takes part beside us. Ten minutes are not enough to ask torch about cases that no target compares with it."""
    if options.peers is not None:
        return options.peers
    return () if options.quick and not targets.has_ratio(case) else tuple(ways.PEERS)


def row_of(case, rows, peak, ours, peers):
    flop = case.flop(rows)
    value = flop / ours.median / 1e9
    best = min(peers, key=lambda peer: peer.median, default=None)
    peer_value = flop / best.median / 1e9 if best else None
    return {
        "bench": "kernels",
        "case": case.name,
        "value": value,
        "unit": "GFLOP/s",
        "peak": peak,
        "of_peak": value / peak,
        "peer": best.name if best else None,
        "peer_value": peer_value,
        "ratio": value / peer_value if best else None,
        "runs": len(ours.seconds),
        "peer_runs": len(best.seconds) if best else None,
    }


HEADER = f"{'':7} {'case':42} {'GFLOP/s':>8} {'peak':>7} {'share':>6} {'torch':>8} {'ratio':>6}  torch's best, runs"


def line_of(row, number, total):
    peer = "       -      -  none"
    if row["peer"]:
        peer = f"{row['peer_value']:8.1f} {row['ratio']:6.2f}  {row['peer']}, {row['peer_runs']}"
    place = f"{number}/{total}"
    return f"{place:>7} {row['case']:42} {row['value']:8.1f} {row['peak']:7.1f} {row['of_peak']:6.3f} {peer}"


def measured(cases, options, peaks):
    """Rows, one by one."""
    contest = None
    for case in cases:
        if contest is None or contest.problem != case.problem:
            contest = None  # frees its tensors before there are others
            status(f"{case.name}: making tensors")
            contest = Contest(case.problem, options.rows)
        peaks.measure()
        peak = peaks.of(case.problem.dtype)
        ours, peers = contest.measure(case.direction, options.repeat, peers_of(case, options), peak)
        peaks.measure()
        yield row_of(case, options.rows, peaks.of(case.problem.dtype), ours, peers)


def measure_all(cases, options, peaks, rows):
    """Prints and writes rows as they come; appends them to `rows`."""
    for row in measured(cases, options, peaks):
        rows.append(row)
        status("")
        print(line_of(row, len(rows), len(cases)), flush=True)
        if options.json:
            results.write(options.json, rows)


def report(rows, options, peaks):
    """Prints what targets the rows tell about; returns whether none is missed."""
    if options.rows != targets.ROWS or peaks.instructions not in targets.INSTRUCTIONS:
        return True
    all_of_them = targets.targets({row["case"]: row for row in rows}, peaks.instructions, peaks.bf16)
    told = [target for target in all_of_them if target.met is not None]
    if not told:
        return True
    print(f"\ntargets for {peaks.instructions}{' with bf16 dot products' if peaks.bf16 else ''}")
    print("\n".join(map(str, told)))
    missed = sum(not target.met for target in told)
    print(f"{len(told) - missed} met, {missed} missed, {len(all_of_them) - len(told)} not measured")
    return not missed


def run(options):
    cases = chosen(options)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    rows = []
    if options.json is not None:
        options.json = results.checked(options.json)
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    peaks = Peaks(torch.get_num_threads())
    print(f"blockcp {blockcp.__version__}, torch {torch.__version__}, {peaks.threads} threads, {peaks}")
    print(f"{options.rows} rows, medians of {options.repeat}, {len(cases)} cases")
    if os.getloadavg()[0] > BUSY:
        print(f"the load average is {os.getloadavg()[0]:.1f}: beside other programs no figure below means much")
    print(HEADER, flush=True)
    begin = time.perf_counter()
    try:
        measure_all(cases, options, peaks, rows)
    except KeyboardInterrupt:
        where = f"; they are in {options.json}" if options.json else ""
        print(f"\n[bench] interrupted after {len(rows)} of {len(cases)} rows{where}", file=sys.stderr)
        return 130
    print(f"{time.perf_counter() - begin:.0f} s, {peaks}")
    none_missed = report(rows, options, peaks)
    return 0 if none_missed or not options.check else 1


def main(argv=None):
    try:
        return run(arguments(argv))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
