"""ZeRO stage 1 as an optimizer, for a model that no strategy wraps, such as a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd.tensor import Tensor, grad_enabled
from minipar.comm.communicator import Communicator
from minipar.nn.optim import Optimizer, check_gradients
from minipar.nn.parameter import Owner, Parameter, owners_of
from minipar.parallel.buckets import number_units
from minipar.parallel.chunks import Chunk, ShardedBucket
from minipar.parallel.contract import check_groups
from minipar.parallel.placement import Placement


def ZeroOptimizer(
    parameters: Sequence[Parameter],
    optimizer: Callable[..., Optimizer],
    comm: Communicator,
    algorithm: str = "ring",
    **options: Any,
) -> Any:
    """Make ZeRO stage 1 as an optimizer, for a model that computes its gradients by itself.

        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp, lr=1e-3)
        loss = model(x, y)             # gradients of this replica's share of the global mean
        clip_grad_norm(model.parameters(), 1.0, mesh.dp, mesh.tp, mesh.pp)     # if wanted: sums them over dp already
        optimizer.step()               # sums them over dp, updates this rank's shard, gathers the parameters
        optimizer.zero_grad()

    `optimizer` and `options` make the optimizer of this rank's shards, which is returned: `lr` and
    `state_dict()` are its own. Sends 2 Psi (d-1)/d elements per rank and step, none of it hidden
    behind computation. UsageError if the ranks of `comm` are not replicas, which hold the same
    parameters.
    """
    return optimizer(ZeroShards(parameters, comm, algorithm).chunk.shards, **options)


class ZeroShards(Owner):
    """The owner of parameters and of this rank's shards of them, which an optimizer updates."""

    def __init__(self, parameters: Sequence[Parameter], comm: Communicator, algorithm: str) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.algorithm = algorithm
        # Other owners, such as tensor parallelism, complete the gradients before they are summed.
        self.others = owners_of(self.parameters)
        for i, p in enumerate(self.parameters):
            if p.placement is None:
                p.placement = Placement(str(i), p.shape)  # it belongs to no named model
        number_units([self.parameters])
        check_groups([(self.parameters, comm)], is_complete=True)
        self.bucket = ShardedBucket(self.parameters, comm)
        self.values = self.bucket.flatten_values("parameters")
        own = self.bucket.own
        self.chunk = Chunk(self.bucket, self.values[own], self.bucket.allocate_gradient()[own])
        self.state = "none"  # gradients are none or local, summed over the ranks, or used by a step
        for p in (*self.parameters, *self.chunk.shards):
            p.owners.append(self)
        for leaf in self.bucket.leaves():
            leaf.register_post_accumulate_grad_hook(self.on_gradient)

    def sum_gradients(self) -> list[Parameter]:
        """Sum the gradients over the ranks, once in a step, and return this rank's shards."""
        if self.state == "none":
            check_gradients(self.parameters)
            for owner in self.others:
                owner.before_step(self.parameters)
            self.comm.reduce_scatter(
                self.bucket.complete(), out=self.chunk.gradient, algorithm=self.algorithm
            )
            self.chunk.accept_sums()
            self.state = "summed"
        return self.chunk.shards

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Sum the gradients, unless their norm has done so. RuntimeError if a step has used them."""
        if self.state == "used":
            raise RuntimeError("optimizer.step() twice for one backward(): call zero_grad() in between")
        self.sum_gradients()

    def after_step(self) -> None:
        """Gather the updated parameters."""
        self.comm.all_gather(self.chunk.data, out=self.values, algorithm="pairwise")
        for owner in self.others:
            owner.after_step()
        self.state = "used"

    def forget_gradients(self) -> None:
        """Forget all gradients; `zero_grad` of the model or of the optimizer calls it."""
        self.state = "none"
        for p in (*self.parameters, *self.chunk.shards):
            p.zero_grad()
        for owner in self.others:
            owner.forget_gradients()

    # ---- refusals

    def on_gradient(self, leaf: Tensor) -> None:
        """Raise RuntimeError if backward has added to gradients that were summed or used already."""
        if self.state != "none":
            remedy = "clip after the last backward of a step, and call zero_grad() after step()"
            raise RuntimeError(f"backward() would add to {self.state} gradients: {remedy}")

    def before_mean_loss(self) -> None:
        """Raise RuntimeError if a script computes a rank's own mean, to train on it."""
        if self.comm.size > 1 and grad_enabled.get():
            why = f"ZeroOptimizer would add up the gradients of {self.comm.size} ranks' means"
            raise RuntimeError(f"{why}: divide model.loss_sum(x, y) by the targets of all ranks")

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError for another optimizer, which would update the parameters a second time."""
        if not set(parameters).isdisjoint(self.parameters):
            raise ValueError("a ZeroOptimizer updates these parameters already: call its step() alone")

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise ValueError: a second sum over ranks would count gradients several times."""
        self.check_optimizer(parameters)
