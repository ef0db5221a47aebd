"""The table of stages: what is sharded, and when gradients are reduced. No other file knows a stage's number.

|         | parameters whole             | gradients whole                | optimizer state |
|---------|------------------------------|--------------------------------|-----------------|
| stage 0 | always                       | until the step                 | whole           |
| stage 1 | always (rebuilt after a step) | until the accumulation boundary | shard          |
| stage 2 | as stage 1                   | while one unit is reduced      | shard           |
| stage 3 | while a unit computes        | while one unit is reduced      | shard           |

Stage 0 is sharding over a group of one: the same mechanism with nothing to gather.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """One row of the table."""

    shard_optimizer: bool
    """Masters, optimizer state and reduced gradients are split over the shard group."""
    shard_gradients: bool
    """Gradients are reduced after every backward, and only their shard is kept."""
    shard_parameters: bool
    """Parameters are whole only while their unit computes."""


STAGES = {
    0: Policy(shard_optimizer=False, shard_gradients=False, shard_parameters=False),
    1: Policy(shard_optimizer=True, shard_gradients=False, shard_parameters=False),
    2: Policy(shard_optimizer=True, shard_gradients=True, shard_parameters=False),
    3: Policy(shard_optimizer=True, shard_gradients=True, shard_parameters=True),
}
