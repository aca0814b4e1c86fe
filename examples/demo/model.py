"""A small transformer over bytes. All its attention goes through blockcp, layer by layer with its own mask.

B batch, L local rows, E model width, Hq/Hkv heads, D head width.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

import blockcp


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 128
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 384
    layers: tuple = ("local", "full", "local", "full")  # the mask of each
    window: int = 512
    vocabulary: int = 256

    def masks(self):
        return {"full": blockcp.Mask(), "local": blockcp.Mask(window=self.window)}


def rotary(positions, head_dim, dtype):
    """cos and sin [B, 1, L, D / 2] of positions inside the documents."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = positions[:, None, :, None].double() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config, mask):
        super().__init__()
        self.config, self.mask = config, mask
        self.q = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x, cos, sin, plan, group):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = blockcp.attention(q, k, v, plan, mask=self.mask, group=group)
        return self.out(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config, mask):
        super().__init__()
        self.attention_norm, self.inner_norm = nn.RMSNorm(config.width, eps=1e-6), nn.RMSNorm(config.width, eps=1e-6)
        self.attention, self.inner = Attention(config, mask), Gated(config)

    def forward(self, x, cos, sin, plan, group):
        x = x + self.attention(self.attention_norm(x), cos, sin, plan, group)
        return x + self.inner(self.inner_norm(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, mask) for mask in config.layers)
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, positions, plan, group):
        x = self.embedding(ids)
        cos, sin = rotary(positions, self.config.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, plan, group)
        return self.head(self.norm(x))
