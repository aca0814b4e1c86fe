"""Attention on one rank beside a loop of torch's attention over the documents, in one process.

A row is the median of several runs, taken in turn, of blockcp and of the loop. Speeds count useful work alone: 4 Hq D
for each visible (query, key) pair forward, 10 Hq D backward.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import time

import packings
import torch
from torch.nn import functional

import blockcp

FLOPS = {"forward": 4, "backward": 10}
PEAK_PROGRAM = pathlib.Path(__file__).parent.parent / "build/bench/bench/blockcp_bench_kernels"


@dataclasses.dataclass
class Case:
    packing: str
    rows: int = 16384
    q_heads: int = 8
    kv_heads: int = 2
    dim: int = 128

    def name(self, direction):
        return f"{self.packing}/d{self.dim}/h{self.q_heads}-{self.kv_heads}/fp32/{direction}/causal"


def arguments():
    parser = argparse.ArgumentParser(prog="script/bench kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    parser.add_argument("--quick", action="store_true", help="only the shortest and the longest documents")
    parser.add_argument("--rows", type=int, default=16384, help="rows in all (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each, of which the median counts (default: %(default)s)"
    )
    return parser.parse_args()


def loop_over_documents(documents):
    def attend(q, k, v):
        parts = zip(*(t.split(documents, dim=2) for t in (q, k, v)))
        outs = [functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(outs, dim=2)

    return attend


def with_blockcp(documents, rows):
    plan = blockcp.plan(lengths=documents, rows=rows, world_size=1, rank=0)
    return lambda q, k, v: blockcp.attention(q, k, v, plan)


def timed(attend, tensors, grad_out):
    """Seconds of one forward and of its backward."""
    begin = time.perf_counter()
    out = attend(*tensors)
    middle = time.perf_counter()
    torch.autograd.grad(out, tensors, grad_out)
    return {"forward": middle - begin, "backward": time.perf_counter() - middle}


def measure(case, repeat):
    documents = packings.lengths(case.packing, case.rows)
    torch.manual_seed(0)
    q = torch.randn(1, case.q_heads, case.rows, case.dim, requires_grad=True)
    k, v = (torch.randn(1, case.kv_heads, case.rows, case.dim, requires_grad=True) for _ in range(2))
    grad_out = torch.randn_like(q)
    ways = {"ours": with_blockcp(documents, case.rows), "peer": loop_over_documents(documents)}
    runs = {way: [] for way in ways}
    for turn in range(repeat + 1):
        for way, attend in ways.items():
            seconds = timed(attend, (q, k, v), grad_out)
            if turn:  # the first warms up
                runs[way].append(seconds)
    work = case.q_heads * case.dim * packings.pairs(documents)
    for direction, flops in FLOPS.items():
        speed = {way: flops * work / statistics.median(run[direction] for run in runs[way]) / 1e9 for way in ways}
        yield direction, speed["ours"], speed["peer"]


def peak():
    """fp32 GFLOP/s that fused multiply-adds on as many threads reach, from the C++ benchmark, or None."""
    if not PEAK_PROGRAM.exists():
        return None
    done = subprocess.run([PEAK_PROGRAM, "--peak", str(torch.get_num_threads())], capture_output=True, text=True)
    return float(done.stdout.split()[0]) if done.returncode == 0 else None


def row_of(case, direction, ours, peer, top):
    return {
        "bench": "kernels",
        "case": case.name(direction),
        "value": ours,
        "unit": "GFLOP/s",
        "peak": top,
        "of_peak": ours / top if top else None,
        "peer": "torch SDPA per document",
        "peer_value": peer,
        "ratio": ours / peer,
    }


def line_of(row):
    share = f"{row['of_peak']:7.2f}" if row["of_peak"] else "      -"
    return f"{row['case']:44} {row['value']:9.1f} {share} {row['peer_value']:9.1f} {row['ratio']:7.2f}"


def main():
    options = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    top = peak()
    peak_text = f"{top:.0f} GFLOP/s" if top else "not measured"
    print(f"{torch.get_num_threads()} threads, fp32 FMA peak {peak_text}, medians of {options.repeat}")
    print(f"{'case':44} {'GFLOP/s':>9} {'of peak':>7} {'torch':>9} {'ratio':>7}")
    rows = []
    for packing in ("gsm8k", "long") if options.quick else packings.NAMES:
        case = Case(packing, rows=options.rows)
        for direction, ours, peer in measure(case, options.repeat):
            rows.append(row_of(case, direction, ours, peer, top))
            print(line_of(rows[-1]), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
