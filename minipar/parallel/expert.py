"""Expert parallelism: each of P ranks holds E/P experts of every layer, and tokens travel to their experts and back.

The ranks have different tokens: they are P neighbours among those of dp x cp (`DeviceMesh.ep`). Rank j holds experts
j E/P to (j+1) E/P - 1. Of n_rj rows, a (token, slot) each, from rank r to an expert on rank j, rank r sends per layer

    dispatch   h sum_{j != r} n_rj elements in forward; in backward as many, the gradients of the results
    combine    h sum_{j != r} n_jr elements in forward, the results; in backward the gradients of the rows

and before each dispatch E (P-1)/P counts of 8 bytes. With a capacity C each rank sends C rows for each expert, E C h
(P-1)/P elements each way, and no counts.

An expert multiplies the rows of all P ranks in one product, in the order of (source rank, token): one device that takes
the P ranks' tokens in one pass does the same, so the bits are the same. The gradient of an expert then covers the P
ranks' tokens. It is summed over the d c/P ranks that hold the same expert, and not over the P ranks again. NB:
frameworks that did so had P times too large gradients, which nobody saw, because AdamW divides a gradient by its size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minipar.autograd import Tensor, mapping
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.errors import check_divides
from minipar.nn.module import Module, Owner, Parameter
from minipar.nn.moe import MoE, moe_layers
from minipar.parallel.placement import place, update


class ExpertParallel(Owner):
    """The ranks of `comm`, which share each layer's experts, and `replicas`, those that hold the same ones.

    It owns the experts' parameters until a data-parallel wrapper takes over, which sums gradients over `replicas`.
    """

    def __init__(self, comm: Communicator, replicas: Communicator) -> None:
        self.comm, self.replicas = comm, replicas

    def check(self, parameters: Sequence[Parameter]) -> None:
        remedy = "wrap the model first: mp.DistributedDataParallel(model, mesh.dp_cp), or mp.shard"
        raise ValueError(f"the optimizer holds experts whose gradients nobody sums over their ranks; {remedy}")

    def run(self, moe: MoE, xs: Tensor, counts: np.ndarray) -> Tensor:
        """Run all E experts on this rank's rows xs (M, h), sorted by expert, counts[e] for e: (M, h). Collective."""
        ranks, h = self.comm.size, xs.shape[1]
        arriving = (counts if moe.capacity_factor else self.comm.all_to_all(counts)).reshape(ranks, -1)  # (P, E/P)
        leaves, arrives = h * counts.reshape(ranks, -1).sum(axis=1), h * arriving.sum(axis=1)  # elements, by rank
        expert = np.repeat(np.tile(np.arange(arriving.shape[1]), ranks), arriving.reshape(-1))  # of each row
        order = from_host(np.argsort(expert, kind="stable"))  # by expert, then source rank, then token

        def exchange(x: Array, sends: Any, receives: Any) -> Array:
            return self.comm.all_to_all(xp.ascontiguousarray(x), counts=(sends, receives)).reshape(-1, h)

        def dispatch(x: Array) -> Array:
            return exchange(x, leaves, arrives)[order]

        def combine(y: Array) -> Array:  # the inverse of dispatch, and its adjoint
            rows = xp.empty_like(y)
            rows[order] = y
            return exchange(rows, arrives, leaves)

        here = mapping(xs, dispatch, combine)
        return mapping(MoE.run_experts(moe, here, arriving.sum(axis=0)), combine, dispatch)


def expert_parallel(model: Module, comm: Communicator, replicas: Communicator) -> None:
    """Keep E/P experts of each layer of `model` on each of P ranks (`mesh.ep`, `mesh.edp`), in place.

    Apply it after tensor parallelism, which splits each expert, and before the pipeline and data parallelism.
    UsageError if P does not divide E. With P = 1 nothing changes.
    """
    if comm.size == 1:
        return
    place(model)
    owner = ExpertParallel(comm, replicas)
    for moe in moe_layers(model):
        check_divides("experts/ep", len(moe.experts), comm.size, "each rank holds whole experts")
        count = len(moe.experts) // comm.size
        moe.experts = moe.experts[comm.rank * count : (comm.rank + 1) * count]
        moe.run_experts = partial(owner.run, moe)
        for p in (p for expert in moe.experts for p in expert.parameters()):
            update(p, ep=comm.rank)
            p.owner = owner
    held = set(model.parameters())
    for part in getattr(model, "parts", ()):
        part.parameters = [p for p in part.parameters if p in held]
