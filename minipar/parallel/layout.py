"""A step's layout, and the placement of every parameter in it, computed for any rank before anything has run."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from minipar.comm.mesh import DeviceMesh
from minipar.nn.gpt import GPT, GPTConfig
from minipar.parallel.buckets import by_unit
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.stage import balanced_cuts, part_costs, part_groups
from minipar.parallel.placement import BucketSlice, Placement, Replicate, Shard
from minipar.parallel.tensor.plan import tensor_placement


@dataclass(frozen=True)
class StepLayout:
    """A model and the mesh that trains it, from which traffic and memory of a step are computed before it runs.

    `samples` is the number of samples in one microbatch of one replica, `itemsize` the bytes of an element, and
    `schedule` the pipeline's, None if pp = 1.
    """

    model: GPTConfig
    length: int
    samples: int
    microbatches: int
    itemsize: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    schedule: Schedule | None = None
    sequence_parallel: bool = False
    recompute: bool = False
    reduction: str = "ring"
    sync_every_microbatch: bool = False

    @property
    def syncs(self) -> int:
        """The number of times per step that gradients are reduced."""
        return self.microbatches if self.sync_every_microbatch else 1

    @property
    def norm_rows(self) -> int:
        """The number of chunks of the gradient whose squares a rank sums: all d without ZeRO, its own with it."""
        return 1 if self.zero_stage else self.dp

    @cached_property
    def homes(self) -> list[int]:
        """The pipeline rank of each part of the model: the embedding, the blocks, the head."""
        if self.schedule is None:
            return [0] * (self.model.n_layer + 2)
        cuts = balanced_cuts(part_costs(self.model, self.length), self.schedule.stages)
        return [self.schedule.home[stage] for stage, count in enumerate(cuts) for _ in range(count)]

    @property
    def ends(self) -> tuple[int, int]:
        """The pipeline ranks with the first part (embedding) and with the last (head, loss)."""
        return self.homes[0], self.homes[-1]

    def blocks(self, pp: int) -> int:
        """Count the transformer layers of a pipeline rank."""
        return self.homes[1:-1].count(pp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a world rank's coordinate on each axis. ValueError for a rank that the layout does not have."""
        if not 0 <= rank < self.dp * self.tp * self.pp:
            raise ValueError(f"rank {rank} of dp*tp*pp = {self.dp}*{self.tp}*{self.pp}")
        coordinates = {}
        for axis in DeviceMesh.AXES:
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def placements(self, dp: int = 0, tp: int = 0, pp: int = 0) -> list[Placement]:
        """Return the placements of the parameters that pipeline rank `pp` owns, for its ranks `dp` and `tp`.

        The strategies record the same placements when they are applied to the model.
        """
        units = _units(self.model, pipelined=self.schedule is not None)
        placements = []
        for i, unit in enumerate(units):
            if self.homes[i] != pp:  # in a pipeline a unit is a part of the model
                continue
            kinds, sizes = [], []
            for name, shape in unit:
                kind = Replicate()
                if self.tp > 1:
                    kind = tensor_placement(name, shape, tp, self.tp, self.sequence_parallel)
                kinds.append(kind)
                sizes.append(math.prod(kind.local_shape(shape) if isinstance(kind, Shard) else shape))
            for j, (name, shape) in enumerate(unit):
                flat = BucketSlice(sum(sizes[:j]), sizes[j], sum(sizes), dp, self.dp)
                placements.append(Placement(name, shape, kinds[j], pp, flat, i, len(units)))
        return placements


@lru_cache(maxsize=64)
def _units(config: GPTConfig, pipelined: bool) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return names and shapes of the serial GPT's parameters, grouped by the bucket in which dp sends them."""
    model = GPT(config, deferred=True)
    names = {p: name for name, p in model.named_parameters()}
    return [[(names[p], p.shape) for p in unit] for unit in (part_groups(model) if pipelined else by_unit(model))]
