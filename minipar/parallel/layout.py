"""A model and the mesh that trains it, before it runs: the placements of any rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from minipar.comm.mesh import DeviceMesh
from minipar.nn.gpt import TransformerConfig
from minipar.parallel.buckets import by_unit
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.model import balanced_cuts, segment_groups
from minipar.parallel.placement import BucketSlice, Placement
from minipar.parallel.placement_table import Placements
from minipar.parallel.tensor.plan import plan_of, tensor_placement


@dataclass(frozen=True)
class StepLayout:
    """A model and its mesh, from which traffic and memory of a step are computed."""

    model: TransformerConfig
    length: int  # tokens of a sample
    samples: int  # in one microbatch of one replica
    microbatches: int
    itemsize: int  # bytes of an element
    gradient_itemsize: int | None = None  # bytes of a gradient's element; None: as itemsize
    reduce_itemsize: int | None = None  # bytes of an element that dp and tp sum; None: as itemsize
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 0
    zero_replicas: int = 1
    schedule: Schedule | None = None  # None if pp = 1
    context_parallel: str = "ring"
    sequence_parallel: bool = False
    recompute: bool = False
    reduction: str = "ring"
    sync_every_microbatch: bool = False
    aux_loss: float = 0.0
    router_bias: float = 0.0
    capacity_factor: float | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient."""
        return self.itemsize if self.gradient_itemsize is None else self.gradient_itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of an element of what dp and tp sum."""
        return self.itemsize if self.reduce_itemsize is None else self.reduce_itemsize

    @property
    def replicas(self) -> int:
        """The ranks over which gradients are summed: d c."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """The ranks over which ZeRO shards: s = d c/q."""
        return self.replicas // self.zero_replicas

    @property
    def edp(self) -> int:
        """The ranks that hold the same experts."""
        return self.replicas // self.ep

    @property
    def expert_sums_apart(self) -> bool:
        """Whether the gradients of experts are summed over other ranks than all else."""
        return self.ep > 1

    @property
    def tokens(self) -> int:
        """The tokens of one microbatch on a rank: B T/c."""
        return self.samples * self.length // self.cp

    @property
    def syncs(self) -> int:
        """The number of times that gradients are reduced in a step."""
        return self.microbatches if self.sync_every_microbatch else 1

    @property
    def leaf_sums(self) -> int:
        """The number of times that Partial gradients are summed over tp: for each leaf of a tree."""
        return self.microbatches if self.reduction == "tree" else self.syncs

    @property
    def enters(self) -> int:
        """The crossings of a layer into tensor parallelism.

        Two in a layer, the attention and the MLP. In a tree q, k, v, gate and up of a Llama enter by
        themselves.
        """
        return 5 if self.reduction == "tree" and self.model.model_type != "gpt2" else 2

    @property
    def norm_rows(self) -> int:
        """The chunks whose squares a rank sums: its own with ZeRO or where others hold other experts, else all."""
        return 1 if self.zero_stage > 0 or self.expert_sums_apart else self.replicas

    @property
    def loads(self) -> int:
        """The counts that a step sums: of each layer's tokens by expert, and of dropped ones."""
        balances = self.router_bias > 0 or self.capacity_factor is not None
        return self.model.n_layer * (self.model.num_local_experts + 1) if balances else 0

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
        """Return a world rank's coordinate on each axis.

        ValueError for a rank that the layout does not have.
        """
        if not 0 <= rank < self.replicas * self.tp * self.pp:
            product = f"{self.dp}*{self.cp}*{self.tp}*{self.pp}"
            raise ValueError(f"rank {rank} of dp*cp*tp*pp = {product}")
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        coordinates = {}
        for axis in DeviceMesh.AXES:  # from the fastest to the slowest
            rank, coordinates[axis] = divmod(rank, sizes[axis])
        return coordinates

    def placements(self, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> Placements:
        """Return the placements of the parameters that the rank at these coordinates owns.

        They follow from the names and shapes of a model without values, and are those that the
        strategies record.
        """
        own = dp * self.cp + cp
        replica, shard = divmod(own, self.shards)
        model = self.model.build(seed=None)
        names = {p: name for name, p in model.named_parameters()}
        plan = plan_of(model)
        units = by_unit(model) if self.schedule is None else segment_groups(model)
        placed = Placements()
        for i, unit in enumerate(units):
            if self.homes[i] != pp:
                continue
            shared, experts = [], []  # experts have a bucket of their own
            for p in unit:
                placement = Placement(names[p], p.shape, pp=pp, unit=i, units=len(units))
                if self.tp > 1:
                    over_tp = tensor_placement(
                        plan, names[p], p.shape, tp, self.tp, self.sequence_parallel
                    )
                    placement = replace(placement, tp=over_tp)
                holder = self.expert_rank(names[p])
                if holder is None:
                    shared.append(placement)
                elif holder == own % self.ep:
                    experts.append(replace(placement, ep=holder))
            placed += in_bucket(shared, shard, self.shards, replica)
            placed += in_bucket(experts, own // self.ep, self.edp, replica)
        return placed

    def expert_rank(self, name: str) -> int | None:
        """Return the rank of ep that holds a parameter; None if all of them hold it."""
        _, is_expert, rest = name.partition(".experts.")
        if not self.expert_sums_apart or not is_expert:
            return None
        expert = int(rest.split(".")[0])
        return expert // (self.model.num_local_experts // self.ep)


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
