"""A model and the mesh that trains it, before it runs: the placements of any rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod

from minipar.nn.gpt import TransformerConfig
from minipar.parallel.buckets import by_unit
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.model import balanced_cuts, segment_groups
from minipar.parallel.placement import BucketSlice, Placement
from minipar.parallel.placement_table import Placements
from minipar.parallel.tensor.plan import plan_of, tensor_placement


@dataclass(frozen=True)
class StepLayout:
    """A model and its mesh, from which traffic and memory of a step are computed.

    A later axis adds its own forms to the core's. Where it changes the core's, it is a subclass.
    """

    model: TransformerConfig
    length: int  # tokens of a sample
    tokens: int  # a microbatch on one rank has so many
    microbatches: int
    itemsize: int  # bytes of an element
    reduce_itemsize: int  # bytes of an element of a gradient, and of what dp and tp sum
    dp: int = 1  # the ranks over which gradients are summed
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    chunk_ranks: int | None = None  # the size of the communicator's `chunk_comm`; None: dp
    schedule: Schedule | None = None  # None if pp = 1
    sequence_parallel: bool = False
    recompute: bool = False
    reduction: str = "ring"
    sync_every_microbatch: bool = False

    @property
    def shards(self) -> int:
        """The ranks over which ZeRO shards: s."""
        return self.dp if self.chunk_ranks is None else self.chunk_ranks

    @property
    def syncs(self) -> int:
        """The number of times that gradients are reduced over dp in a step."""
        return self.microbatches if self.sync_every_microbatch else 1

    @property
    def partial_syncs(self) -> int:
        """The number of times that Partial gradients are summed over tp, and a tied table's sent over pp."""
        return self.syncs

    @property
    def enters(self) -> int:
        """The crossings of a layer into tensor parallelism: the attention's and the MLP's."""
        return 2

    @property
    def splits_squares(self) -> bool:
        """Whether the ranks of dp sum different squares for the norm, each its own."""
        return self.zero_stage > 0

    def norm_sums(self, count: int) -> list[int]:
        """Return how many values each of the norm's all-reduces adds, for so many sums of squares."""
        return [count]

    @cached_property
    def homes(self) -> list[int]:
        """The pipeline rank of each segment of the model: the embedding, the blocks, the head."""
        if self.schedule is None:
            return [0] * (self.model.n_layer + 2)
        homes = []
        cuts = balanced_cuts(self.model.segment_flops(self.length), self.schedule.stages)
        for stage, segments in enumerate(cuts):
            homes += [self.schedule.home[stage]] * segments
        return homes

    @property
    def first(self) -> int:
        """The pipeline rank with the embedding."""
        return self.homes[0]

    @property
    def last(self) -> int:
        """The pipeline rank with the head."""
        return self.homes[-1]

    def blocks(self, pp: int) -> int:
        """Count the transformer layers of a pipeline rank."""
        return self.homes[1:-1].count(pp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a world rank's coordinate on each axis."""
        replica, tp = divmod(rank, self.tp)
        pp, dp = divmod(replica, self.dp)
        return {"dp": dp, "tp": tp, "pp": pp}

    def placements(self, dp: int = 0, tp: int = 0, pp: int = 0) -> Placements:
        """Return the placements of the parameters that the rank at these coordinates owns."""
        return Placements(chain.from_iterable(self.buckets(dp, tp, pp)))

    def buckets(self, dp: int = 0, tp: int = 0, pp: int = 0) -> list[list[Placement]]:
        """Return the placements of each bucket's parameters.

        They follow from the names and shapes of a model without values, and are those that the
        strategies record.
        """
        model = self.model.build(seed=None)
        names = {p: name for name, p in model.named_parameters()}
        plan = plan_of(model)
        units = by_unit(model) if self.schedule is None else segment_groups(model)
        buckets = []
        for i, unit in enumerate(units):
            if self.homes[i] != pp:
                continue
            placed = []
            for p in unit:
                placement = Placement(names[p], p.shape, pp=pp, unit=i, units=len(units))
                if self.tp > 1:
                    over_tp = tensor_placement(
                        plan, names[p], p.shape, tp, self.tp, self.sequence_parallel
                    )
                    placement = replace(placement, tp=over_tp)
                placed.append(placement)
            for members, rank, ranks in self.groups(placed, dp):
                buckets.append(in_bucket(members, rank, ranks, dp // self.shards))
        return buckets

    def groups(self, unit: list[Placement], dp: int) -> list[tuple[list[Placement], int, int]]:
        """Divide a unit by who sums its gradients: (placements, this rank among these ranks, their number)."""
        return [(unit, dp % self.shards, self.shards)]


def in_bucket(placements: Sequence[Placement], rank: int, ranks: int, replica: int) -> list[Placement]:
    """Put parameters into one bucket, whose chunk `rank` of `ranks` is this rank's."""
    sizes = [prod(placement.local_shape) for placement in placements]
    placed = []
    offset = 0
    for placement, size in zip(placements, sizes, strict=True):
        owned = BucketSlice(offset, size, sum(sizes), rank, ranks, replica)
        placed.append(replace(placement, dp=owned))
        offset += size
    return placed
