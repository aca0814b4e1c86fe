"""Errors of attention on one causal document, ours beside torch's, against the same computed in double.

An error is the L2 norm of the difference over the norm of the exact result. The inputs are normal, rounded to the type,
and the exact result is that of the rounded inputs. Of long documents only the first KV head and its query heads are
compared. For fp64, the error is how far two computations in double are apart.
"""

import argparse
import dataclasses
import os
import random
import sys

import results
import torch
from torch.nn import functional

import blockcp

TYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (64, 512, 4096, 16384)
Q_HEADS, KV_HEADS, DIM = 8, 2, 128
GROUP = Q_HEADS // KV_HEADS
WHOLE = 4096  # documents up to this length are compared in all heads
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass
class Case:
    dtype: str
    rows: int

    def name(self, tensor):
        return f"one/d{DIM}/h{Q_HEADS}-{KV_HEADS}/{self.dtype}/{self.rows}/{tensor}"

    def tensors(self, seed):
        """q, k, v and dout."""
        generator = torch.Generator().manual_seed(seed)
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS):
            drawn = torch.randn(1, heads, self.rows, DIM, generator=generator, dtype=torch.float64)
            yield drawn.to(TYPES[self.dtype])

    def compared(self):
        """How many KV heads."""
        return KV_HEADS if self.rows <= WHOLE else 1


def arguments():
    parser = argparse.ArgumentParser(prog="script/bench accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    parser.add_argument("--kernel", help="a name or family, as in blockcp.attention (default: the best)")
    parser.add_argument("--dtype", choices=TYPES, nargs="+", default=list(TYPES), help="only these")
    parser.add_argument("--rows", type=results.positive, nargs="+", default=LENGTHS, help="lengths of the document")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: fresh")
    return parser.parse_args()


@torch.no_grad()
def exact(q, k, v, dout):
    """(out, lse, dq, dk, dv) of heads [GROUP, rows, DIM] of one KV head, in double, some query rows at a time."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale, rows = DIM**-0.5, 256
    dk, dv, parts = torch.zeros_like(k), torch.zeros_like(v), []
    for begin in range(0, q.shape[1], rows):
        end = min(begin + rows, q.shape[1])
        queries, grad, keys, values = q[:, begin:end], dout[:, begin:end], k[:end], v[:end]
        hidden = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
        scores = (scale * (queries @ keys.T)).masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        out = weights @ values
        dv[:end] += (weights.mT @ grad).sum(0)
        ds = (grad @ values.T).sub_((out * grad).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        dk[:end] += (ds.mT @ queries).sum(0)
        parts.append((out, lse, ds @ keys))
    return (*(torch.cat(part, 1) for part in zip(*parts)), dk, dv)


def of_blockcp(q, k, v, dout, kernel):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = blockcp.plan(lengths=[q.shape[2]], world_size=1, rank=0)
    out, lse = blockcp.attention(*leaves, plan, return_lse=True, kernel=kernel)
    return (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))


def of_torch(q, k, v, dout):
    """lse comes from the op behind the function, which has no argument for it."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    wide = (x.detach().repeat_interleave(GROUP, 1) for x in (k, v))
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.detach(), *wide, is_causal=True)[1]
    return (out.detach(), lse, *gradients)


def errors(case, seed, kernel):
    """For each result, the error of ours and of torch's."""
    tensors = list(case.tensors(seed))
    ways = [of_blockcp(*tensors, kernel), of_torch(*tensors)]
    squares = torch.zeros(len(NAMES), len(ways) + 1, dtype=torch.float64)
    for head in range(case.compared()):
        group = slice(head * GROUP, (head + 1) * GROUP)
        q, k, v, dout = tensors
        truth = exact(q[0, group], k[0, head], v[0, head], dout[0, group])
        for i, right in enumerate(truth):
            heads = head if NAMES[i] in ("dk", "dv") else group
            squares[i, -1] += right.square().sum()
            for way, found in enumerate(ways):
                squares[i, way] += (found[i][0, heads] - right).square().sum()
    return (squares[:, :-1] / squares[:, -1:]).sqrt().tolist()


def rows_of(case, found):
    for name, (ours, peer) in zip(NAMES, found):
        yield {
            "bench": "accuracy",
            "case": case.name(name),
            "value": ours,
            "unit": "relative L2",
            "peak": None,
            "of_peak": None,
            "peer": "torch SDPA",
            "peer_value": peer,
            "ratio": ours / peer if peer else None,
        }


def run(options):
    if options.json is not None:
        options.json = results.checked(options.json)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"seed {options.seed}, kernel {options.kernel or 'the best'}; ours / torch {torch.__version__}'s\n")
    print(f"| type | rows | {' | '.join(NAMES)} |\n|{' --- |' * (len(NAMES) + 2)}")
    rows = []
    for case in (Case(dtype, n) for dtype in options.dtype for n in options.rows):
        found = errors(case, options.seed, options.kernel)
        rows += rows_of(case, found)
        cells = " | ".join(f"{ours:.1e} / {peer:.1e}" for ours, peer in found)
        print(f"| {case.dtype} | {case.rows} | {cells} |", flush=True)
        if options.json:
            results.write(options.json, rows)


def main():
    try:
        run(arguments())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
