"""Expert parallelism: each of P ranks holds E/P experts of every layer, and tokens travel to their experts and back.

The ranks route different tokens: they are P neighbours among those of dp x cp (`DeviceMesh.ep`).
Rank j holds experts j E/P to (j+1) E/P - 1. Of n_rj rows, a (token, slot) each, from rank r to an
expert on rank j, rank r sends per layer

    dispatch   h sum_{j != r} n_rj elements in forward; in backward as many, the gradients of the results
    combine    h sum_{j != r} n_jr elements in forward, the results; in backward the gradients of the rows

and before each dispatch E (P-1)/P counts of 8 bytes.

An expert multiplies the rows of all P ranks in one product, in the order of (source rank, token):
one device that takes the P ranks' tokens in one pass does the same, so the bits are the same. The
gradient of an expert then covers the P ranks' tokens. It is summed over the ranks of edp, which hold
the same expert, and not over the P ranks again. NB: frameworks that did so had P times too large
gradients, which nobody saw, because AdamW divides a gradient by its size.

Seams of the core: `shard(groups=)` and owners.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from minipar.autograd.tensor import Tensor, mapping
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides
from minipar.more.experts.mixtral import MoE, moe_layers
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter
from minipar.parallel.buckets import Group, by_unit
from minipar.parallel.placement import attach_placements, number_units, update
from minipar.parallel.split_guards import check_split, note_split


class ExpertParallel(Owner):
    """The ranks of `comm`, which share each layer's experts, and `replicas`, those that hold the same ones.

    Data parallelism sums the experts' gradients over `replicas`, and all others over all ranks with
    other tokens: give it `groups`. Until somebody has asked for them, an optimizer that holds
    experts is refused.
    """

    def __init__(self, model: Module, comm: Communicator, replicas: Communicator) -> None:
        self.model = model
        self.comm = comm
        self.replicas = replicas
        self.experts: set[Parameter] = set()  # the parameters of this rank's experts
        self.has_groups = False

    def groups(
        self, comm: Communicator, units: Sequence[Sequence[Parameter]] | None = None
    ) -> list[Group]:
        """Cut units of parameters (default: by_unit) into those summed over `comm` and the experts, over `replicas`.

        UsageError unless `comm` has all ranks that share the experts, and their replicas.
        """
        self.check_ranks(comm)
        if self.experts and comm.chunk_comm.size < comm.size:
            raise UsageError("replicas of shards: those of experts have none; give 1 replica or ep = 1")
        self.has_groups = True
        if units is None:
            units = by_unit(self.model)
        if self.experts:
            number_units(units)  # a unit that is cut stays one unit of the gradient's norm
        groups: list[Group] = []
        for unit in units:
            experts = [p for p in unit if p in self.experts]
            others = [p for p in unit if p not in self.experts]
            if others:
                groups.append((others, comm))
            if experts:
                groups.append((experts, self.replicas))
        return groups

    def check_ranks(self, comm: Communicator) -> None:
        """Raise UsageError unless `comm` has all ranks that share the experts, and their replicas."""
        count = self.comm.size * self.replicas.size
        needed = {*self.comm.ranks, *self.replicas.ranks}
        fits = comm.size == count and needed <= set(comm.ranks)
        if self.experts and not fits:
            ranks = f"the {count} ranks of ep = {self.comm.size} and edp = {self.replicas.size} hold different tokens"
            remedy = "wrap it over mesh.dp_cp"
            raise UsageError(
                f"a wrapper over ranks {comm.ranks} of a model of shared experts: {ranks}; {remedy}"
            )

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if nobody sums the experts' gradients."""
        if not self.has_groups:
            remedy = "wrap the model first: mp.shard(model, mesh.dp_cp, stage, groups=experts.groups(mesh.dp_cp))"
            raise ValueError(
                f"the optimizer holds experts whose gradients nobody sums over their ranks; {remedy}"
            )

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError unless experts' gradients are summed over the ranks that hold the same experts."""
        if group is not self.replicas:
            why = "the ranks of ep hold different experts and different tokens"
            remedy = (
                "experts = mp.expert_parallel(...), then mp.shard(..., groups=experts.groups(mesh.dp_cp))"
            )
            raise UsageError(
                f"experts are summed over other ranks than all else, for {why}: write {remedy}"
            )

    def run(self, moe: MoE, xs: Tensor, counts: np.ndarray) -> Tensor:
        """Run all E experts on this rank's rows: xs (M, h) -> (M, h). All ranks call it.

        The rows are sorted by expert, and counts[e] of them are for expert e.
        """
        ranks = self.comm.size
        h = xs.shape[1]
        leaving = counts.reshape(ranks, -1)  # (P, E/P): this rank's rows for the experts of each rank
        arriving = self.comm.all_to_all(counts).reshape(ranks, -1)  # (P, E/P): each rank's rows
        # A message has the rows of one source rank, by expert. `order` sorts all rows by expert.
        experts = np.tile(np.arange(arriving.shape[1]), ranks)
        expert_of_row = np.repeat(experts, arriving.reshape(-1))
        order = from_host(np.argsort(expert_of_row, kind="stable"))
        leaves = (h * leaving.sum(axis=1)).tolist()  # (P,): elements for each rank
        arrives = (h * arriving.sum(axis=1)).tolist()  # (P,): elements from each rank

        def exchange(x: Array, sends: Sequence[int], receives: Sequence[int]) -> Array:
            x = xp.ascontiguousarray(x)
            return self.comm.all_to_all(x, counts=(sends, receives)).reshape(-1, h)

        def dispatch(x: Array) -> Array:
            return exchange(x, leaves, arrives)[order]

        def combine(y: Array) -> Array:  # the inverse of dispatch, and its adjoint
            rows = xp.empty_like(y)
            rows[order] = y
            return exchange(rows, arrives, leaves)

        here = mapping(xs, dispatch, combine)
        results = MoE.run_experts(moe, here, arriving.sum(axis=0))
        return mapping(results, combine, dispatch)


def expert_parallel(model: Module, comm: Communicator, replicas: Communicator) -> ExpertParallel:
    """Keep E/P experts of each layer of `model` on each of P ranks (`mesh.ep`, `mesh.edp`), in place.

    Apply it after tensor parallelism, which splits each expert, and before the pipeline. Give the
    `groups` of what it returns to data parallelism. UsageError if P does not divide E. With P = 1
    nothing changes.
    """
    check_split(model, "expert_parallel", comm)
    owner = ExpertParallel(model, comm, replicas)
    if comm.size > 1 and not moe_layers(model):
        raise UsageError(
            f"expert_parallel: {type(model).__name__} has no experts to share out; give an mp.Mixtral"
        )
    for moe in moe_layers(model):
        check_divides("experts/ep", len(moe.experts), comm.size, "each rank holds whole experts")
    note_split(model, "expert_parallel", comm)
    if comm.size == 1:
        return owner
    attach_placements(model)
    for moe in moe_layers(model):
        count = len(moe.experts) // comm.size
        moe.experts = moe.experts[comm.rank * count : (comm.rank + 1) * count]
        moe.run_experts = partial(owner.run, moe)
        for p in (p for expert in moe.experts for p in expert.parameters()):
            update(p, ep=comm.rank)
            p.owners.append(owner)
            owner.experts.add(p)
    held = set(model.parameters())
    for segment in getattr(model, "segments", ()):
        segment.parameters = [p for p in segment.parameters if p in held]
    return owner
