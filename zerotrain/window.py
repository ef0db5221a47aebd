"""What a training loop hands to the engine between two steps: losses, token counts, and gradients that want scaling."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from zerotrain.errors import ZerotrainError


class Scaling(Protocol):
    """The engine, as far as the gradient of an output needs it."""

    driven: bool
    """Whether the backward under way was called through the engine, which has scaled the loss."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""


class Window:
    """What the backwards of an open window add up to, on this rank."""

    def __init__(self) -> None:
        self.tokens: int | torch.Tensor = 0
        self.losses: float | torch.Tensor = 0.0
        self.micro_batches = 0
        self.backwards = 0
        self.counted = False

    def add(self, loss: torch.Tensor, tokens: int | torch.Tensor | None) -> None:
        """Count a backward of `loss`, a sum over `tokens` if given; ZerotrainError where only some of a window have them."""
        if self.backwards and self.counted != (tokens is not None):
            raise ZerotrainError(
                "some backwards of this window came with tokens= and others without; give it in all of them or in none"
            )
        self.counted = tokens is not None
        self.losses = self.losses + loss.detach().double()
        self.backwards += 1
        if tokens is not None:
            self.tokens = self.tokens + (tokens.detach() if isinstance(tokens, torch.Tensor) else tokens)


class ScaleGradient(torch.autograd.Function):
    """The identity; its backward multiplies by the loss scale where `loss.backward()` was called without the engine."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, engine: Scaling) -> torch.Tensor:
        """The tensor; fp16 becomes fp32, so that its gradient is scaled before it is rounded."""
        ctx.engine = engine
        return tensor.view_as(tensor).float() if tensor.dtype == torch.float16 else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient, scaled unless the loss was."""
        engine: Scaling = ctx.engine
        return (grad if engine.driven else grad * engine.loss_scale), None


def scaled_gradient(tensor: torch.Tensor, engine: Scaling) -> torch.Tensor:
    """`tensor`, in fp32 where it was fp16, whose gradient will be multiplied by the loss scale if nobody else does."""
    scaled: torch.Tensor = ScaleGradient.apply(tensor, engine)  # type: ignore[no-untyped-call]
    return scaled


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned; ZerotrainError where there is none to be found."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise ZerotrainError(
            "train_batch needs a model that returns its loss: a scalar, `.loss`, or a tuple that starts with it"
        )
    return loss
