# One training step, every rank with the same whole batch: torchrun --nproc-per-node 4 examples/python/train_step.py
import torch
import torch.distributed as dist
import torch.nn.functional as F

import blockcp


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = torch.nn.Embedding(50, 64), torch.nn.Linear(64, 192), torch.nn.Linear(64, 50)

    def forward(self, input_ids, position_ids):  # a rotary embedding must use these positions: they count in documents
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.head(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and batch on all ranks
model, tokens = Model(), torch.randint(50, (1, 62))
plan = blockcp.plan(lengths=[30, 8, 20], rows=62, group=dist.group.WORLD, pad=True)  # once per batch
part = blockcp.shard({"input_ids": tokens, "labels": tokens}, plan)  # this rank's rows; adds position_ids, shift_labels
with blockcp.step(plan, dist.group.WORLD):  # F.scaled_dot_product_attention is blockcp.sdpa in here
    logits = model(part["input_ids"], part["position_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum") / 55
    loss.backward()
for p in model.parameters():
    dist.all_reduce(p.grad)  # a sum: nothing was scaled by the number of ranks
dist.all_reduce(loss)
print(f"rank {dist.get_rank()}: loss {loss:.6f}, |gradient of qkv| {model.qkv.weight.grad.norm():.6f}")
dist.destroy_process_group()
