"""The loss scale of fp16 training: constant, or raised and lowered by whether gradients overflow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LossScale:
    """A scale and its rule, as a value: `after(overflow)` gives the next one.

    Dynamic scaling halves the scale after `hysteresis` overflowing steps (counted until a window passes without one, or,
    with `consecutive_hysteresis`, until the next good step) and doubles it after `window` good steps; it never falls below
    `minimum`. (Mixed Precision Training, Micikevicius et al., 2018.)
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False
    good_steps: int = 0
    tolerance: int = 2
    """Overflows still tolerated before the scale falls."""

    def resumed(self, saved: dict[str, Any]) -> LossScale:
        """This rule, from where a saved one of the same kind had come to."""
        if not (self.dynamic and saved["dynamic"]):
            return self
        return replace(self, **{key: saved[key] for key in ("scale", "good_steps", "tolerance")})

    def after(self, overflow: bool) -> LossScale:
        """The scale for the step that follows one with, or without, an overflow."""
        if not self.dynamic:
            return self
        if overflow:
            if self.tolerance > 1:
                return replace(self, tolerance=self.tolerance - 1, good_steps=0)
            return replace(self, scale=max(self.scale / 2, self.minimum), good_steps=0)
        grown = (self.good_steps + 1) % self.window == 0
        tolerance = self.hysteresis if grown or self.consecutive_hysteresis else self.tolerance
        scale = self.scale * 2 if grown else self.scale
        return replace(self, scale=scale, good_steps=0 if grown else self.good_steps + 1, tolerance=tolerance)
