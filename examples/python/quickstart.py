# Four ranks attend over three packed documents: torchrun --nproc-per-node 4 examples/python/quickstart.py
import torch
import torch.distributed as dist

import blockcp

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
plan = blockcp.plan(lengths=[30, 8, 20], rows=64, world_size=world, rank=rank)  # the last 6 rows are padding
q = torch.randn(1, 4, plan.local_rows, 32, requires_grad=True)  # [B, heads, rows of this rank, width]
k, v = (torch.randn(1, 2, plan.local_rows, 32, requires_grad=True) for _ in range(2))
out = blockcp.attention(q, k, v, plan, group=dist.group.WORLD)
out.square().sum().backward()
print(f"rank {rank}: path {plan.choice['full'].path}, out {tuple(out.shape)}, |dk| {k.grad.norm():.3f}")
dist.destroy_process_group()
