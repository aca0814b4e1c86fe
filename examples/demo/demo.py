"""Trains a byte-level transformer on packed documents, on several ranks and on one, and compares the two.

The documents are the source files of Python's standard library. All attention goes through blockcp, which cuts the
packed sequence over the ranks. Before the training, the C++ program `blockcp run` does the same packing on threads.
The exit status is 0 only if losses and first-step gradients of the two runs agree.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import compare
import data
import facts
import model
import picture
import torch

HERE = pathlib.Path(__file__).resolve().parent
BLOCKCP = HERE.parent.parent / "build" / "dev" / "cli" / "blockcp"


def arguments():
    parser = argparse.ArgumentParser(
        prog="script/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["fp32", "fp64"], default="fp32", help="of the training (default: fp32)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share a sequence (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=6144, help="rows of a packed sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of documents and weights (default: %(default)s)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/demo"), help="folder (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.steps < 1 or options.ranks < 1:
        parser.error(f"--steps and --ranks must be at least 1, but are {options.steps} and {options.ranks}")
    if options.rows < data.LONGEST or options.rows % options.ranks:
        parser.error(
            f"--rows must be at least {data.LONGEST} and a multiple of --ranks, but is {options.rows}"
            f" with {options.ranks} ranks"
        )
    return options


def headline(text):
    print(f"\n== {text}", flush=True)


def run(command, threads=None):
    """Shows its output as it comes; ends the demo if it fails."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    status = subprocess.run([str(word) for word in command], env=environment).returncode
    if status:
        sys.exit(f"[demo] this command ended with status {status}: {' '.join(map(str, command))}")


def run_in_cpp(options, lengths):
    config = model.Config()
    path = options.out / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)) + "\n")
    command = [BLOCKCP, "run", "--ranks", options.ranks, "--lengths", path, "--rows", options.rows]
    command += ["--heads", f"{config.heads}/{config.kv_heads}", "--dim", config.head_dim, "--dtype", options.dtype]
    run(command)
    print(f"\nwith a window of {config.window} rows:", flush=True)
    run([*command, "--window", config.window])


def train(options, ranks):
    out = options.out / f"ranks{ranks}"
    out.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    run(
        [*torchrun, HERE / "train.py", "--steps", options.steps, "--rows", options.rows, "--seed", options.seed]
        + ["--dtype", options.dtype, "--out", out],
        threads=max(1, len(os.sched_getaffinity(0)) // ranks),
    )
    return json.loads((out / "record.json").read_text()), torch.load(out / "gradients.pt")


def main():
    options = arguments()
    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    packs = data.packs(options.steps, options.rows, options.seed)
    lengths = [len(text) for text in packs[0]]
    headline(f"{len(lengths)} documents, {sum(lengths)} of {options.rows} rows; blockcp run on {options.ranks} threads")
    run_in_cpp(options, lengths)
    runs = {}
    for ranks in (options.ranks, 1):
        headline(f"training on {ranks} rank{'s' if ranks > 1 else ''}, {options.dtype}")
        runs[ranks] = train(options, ranks)
    masks = facts.of_masks(lengths, options.rows, options.ranks, model.Config().masks())
    headline("the first packed sequence, mask by mask")
    print(facts.table(masks))
    print(facts.summary(packs, options.rows, options.ranks, model.Config().masks()))
    headline("losses and first-step gradients")
    agreed = compare.report(runs[options.ranks], runs[1], options.ranks, options.dtype)
    png = options.out / "packing.png"
    picture.draw(png, lengths, options.rows, options.ranks, masks)
    print(f"\npicture: {png}\n{time.perf_counter() - started:.0f} s in all")
    sys.exit(0 if agreed else 1)


if __name__ == "__main__":
    main()
