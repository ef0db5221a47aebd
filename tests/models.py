"""Models of the tests: two to four blocks of width 8 to 16, so that a training step takes about a millisecond."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block without attention: every parameter gets a gradient far from zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@dataclass(frozen=True)
class Shape:
    """What the oracle matrix varies in the model."""

    vocab: int = 16
    width: int = 8
    hidden: int = 16
    blocks: int = 3
    tied: bool = False
    frozen: bool = False
    recompute: str = ""  # "", "nonreentrant" or "reentrant"


class TinyLM(nn.Module):
    """Embedding, blocks, norm, head; ``forward(tokens, targets)`` is the mean cross entropy, in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute = shape.recompute
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.hidden) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        if shape.frozen:  # a whole block, and a part of another
            self.blocks[1].requires_grad_(False)
            self.blocks[0].norm.requires_grad_(False)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.roll(x, 1, dims=1)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden_states(tokens))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Regression(nn.Module):
    """A stack of linear layers with a mean squared error; every size is ``width``."""

    def __init__(self, width: int = 8, depth: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.predict(x).float(), y.float())


def token_batch(step: int, rows: int, vocab: int = 16, length: int = 5) -> tuple[Tensor, Tensor]:
    """The global batch of optimizer step ``step``: tokens and targets, both (rows, length)."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def vector_batch(step: int, rows: int, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (rows, width), standard normal."""
    generator = torch.Generator().manual_seed(2000 + step)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)
