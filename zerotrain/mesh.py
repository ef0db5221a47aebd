"""The grid of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ProcessMesh:
    """`world = dp_replicate x dp_shard`, dp_shard innermost: shards stay among neighbours, replicas across groups.

    `rank` is the global rank.
    """

    dp_replicate: int
    dp_shard: int
    rank: int

    @classmethod
    def build(cls, world_size: int, rank: int, shard_group_size: int) -> ProcessMesh:
        """ValueError where `shard_group_size` does not divide `world_size`."""
        if world_size % shard_group_size:
            raise ValueError(
                f"zero_optimization.shard_group_size: {shard_group_size} does not divide the world size {world_size} "
                f"({world_size} = dp_replicate x {shard_group_size} has no whole solution); use a divisor of {world_size}"
            )
        return cls(world_size // shard_group_size, shard_group_size, rank)

    @property
    def world_size(self) -> int:
        """All ranks: `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_index(self) -> int:
        """This rank's place in its shard group."""
        return self.rank % self.dp_shard

    def shard_groups(self) -> list[list[int]]:
        """The ranks of each group that shares one copy of the states."""
        return [list(range(r * self.dp_shard, (r + 1) * self.dp_shard)) for r in range(self.dp_replicate)]

    def replicate_groups(self) -> list[list[int]]:
        """The ranks of each group that holds the same shard."""
        return [list(range(s, self.world_size, self.dp_shard)) for s in range(self.dp_shard)]

    def new_group(self, groups: list[list[int]]) -> tuple[list[int], dist.ProcessGroup | None]:
        """Make one process group for every list of ranks (all ranks must call this); this rank's ranks and group.

        No group is made where groups have one rank.
        """
        mine = next(ranks for ranks in groups if self.rank in ranks)
        if len(mine) == 1:
            return mine, None
        made = [dist.new_group(ranks) for ranks in groups]
        return mine, made[groups.index(mine)]
