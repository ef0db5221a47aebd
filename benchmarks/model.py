"""The models that are measured: a plain GPT in three sizes, and a thousand small layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    hidden: int
    blocks: int
    vocab: int
    heads: int = 8


PRESETS = {"tiny": Size(64, 2, 128), "33M": Size(512, 10, 2048), "300M": Size(1024, 22, 8192, 16)}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        d = size.hidden
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, tokens, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids `(batch, tokens)` to the mean cross entropy of the next tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.vocab = size.vocab
        self.tokens, self.positions = nn.Embedding(size.vocab, size.hidden), nn.Embedding(1024, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class SmallLayers(nn.Module):
    """A thousand linear layers of width 64, where an engine's cost per layer shows."""

    def __init__(self, layers: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.vocab = width
        self.embedding = nn.Embedding(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return F.cross_entropy(x.float().flatten(0, 1), targets.flatten())


def build(model: str, preset: str) -> nn.Module:
    """The model `gpt` or `small`, with the same weights in every process."""
    torch.manual_seed(0)
    return SmallLayers() if model == "small" else GPT(PRESETS[preset])
