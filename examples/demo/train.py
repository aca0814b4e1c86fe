"""One rank of the training: started by torchrun, with as many ranks as the sequence is cut into.

Rank 0 leaves in --out: losses, times and the first step's gradients, for the comparison in demo.py.
"""

import argparse
import json
import os
import pathlib
import time

import data
import model
import torch
import torch.distributed as dist
from torch.nn import functional

import blockcp


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtype", choices=["fp32", "fp64"], required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args()


def loss_of(network, pack, rows, group):
    """This rank's share of the mean loss over all supervised bytes; the ranks' shares add up to it."""
    plan = blockcp.plan(
        lengths=[len(text) for text in pack],
        rows=rows,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        masks=network.config.masks(),
    )
    shard = blockcp.shard(data.batch_of(pack, rows), plan)
    logits = network(shard["input_ids"], shard["position_ids"], plan, group)
    total = functional.cross_entropy(
        logits.flatten(0, 1), shard["shift_labels"].flatten(), reduction="sum", ignore_index=-100
    )
    return total / data.supervised(pack)


def sum_gradients(network):
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)


def train(options, say):
    group = dist.group.WORLD
    torch.manual_seed(options.seed)
    network = model.Transformer(model.Config()).to({"fp32": torch.float32, "fp64": torch.float64}[options.dtype])
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.95))
    losses, seconds, gradients = [], [], {}
    packs = data.packs(options.steps, options.rows, options.seed)
    for step, pack in enumerate(packs, 1):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(network, pack, options.rows, group)
        loss.backward()
        sum_gradients(network)
        if step == 1:
            gradients = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        seconds.append(time.perf_counter() - started)
        say(f"  step {step:3}/{len(packs)}  loss {losses[-1]:.6f}  {sum(map(len, pack)) / seconds[-1]:7.0f} tokens/s")
    return {"losses": losses, "seconds": seconds, "tokens": [sum(map(len, pack)) for pack in packs]}, gradients


def main():
    options = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torchrun sets it where the caller has not
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    say = (lambda text: print(text, flush=True)) if first else (lambda text: None)
    record, gradients = train(options, say)
    if first:
        (options.out / "record.json").write_text(json.dumps(record))
        torch.save(gradients, options.out / "gradients.pt")
    dist.barrier()  # no rank closes its connections while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
