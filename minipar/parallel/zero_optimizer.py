"""ZeRO stage 1 as an optimizer, for a model that no strategy wraps, such as a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

from minipar.autograd.tensor import Tensor, grad_enabled
from minipar.comm.communicator import Communicator
from minipar.nn.optim import Optimizer, check_gradients
from minipar.nn.parameter import Parameter, owners_of
from minipar.parallel.chunks import ShardedBucket
from minipar.parallel.contract import Contract, check_groups
from minipar.parallel.placement import Placement, number_units


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
    return optimizer(ZeroShards(parameters, comm, algorithm).bucket.updated, **options)


class ZeroShards(Contract):
    """The owner of parameters and of this rank's shards of them, which sums gradients when a step needs them."""

    remedy = "call step() of the ZeroOptimizer alone"

    def __init__(self, parameters: Sequence[Parameter], comm: Communicator, algorithm: str) -> None:
        self.comm = comm
        self.algorithm = algorithm
        # Other owners, such as tensor parallelism, complete the gradients before they are summed.
        self.others = owners_of(parameters)
        for i, p in enumerate(parameters):
            if p.placement is None:
                p.placement = Placement(str(i), p.shape)  # it belongs to no named model
        number_units([parameters])
        check_groups([(parameters, comm)], is_complete=True)
        self.bucket = ShardedBucket(parameters, comm, keeps_gradient=True)
        super().__init__([self.bucket], self.gather, holds_values=True)

    def sum_gradients(self) -> list[Parameter]:
        """Sum the gradients over the ranks, once in a step, and return this rank's shards."""
        if self.state == "none":
            check_gradients(self.bucket.parameters)
            for owner in self.others:
                owner.before_step(self.bucket.parameters)
            gradient = self.bucket.complete()
            self.bucket.chunk.start_sum(gradient, self.algorithm).wait()
            self.bucket.chunk.accept_sum()
            self.state = "summed"
        return self.bucket.updated

    def gather(self) -> None:
        """Gather the updated parameters."""
        self.bucket.chunk.start_gather(self.bucket.values).wait()
        for owner in self.others:
            owner.after_step()

    def forget_gradients(self) -> None:
        super().forget_gradients()
        for owner in self.others:
            owner.forget_gradients()

    # ---- refusals

    def on_gradient(self, leaf: Tensor) -> None:
        """Raise RuntimeError if backward has added to gradients that were summed or used already."""
        if self.state != "none":
            raise RuntimeError(
                f"backward() would add to {self.state} gradients: clip after the last backward of a "
                "step, and call zero_grad() after step()"
            )

    def before_mean_loss(self) -> None:
        """Raise RuntimeError if a script computes a rank's own mean, to train on it."""
        if self.comm.size > 1 and grad_enabled.get():
            raise RuntimeError(
                f"ZeroOptimizer would add up the gradients of {self.comm.size} ranks' means: divide "
                "model.loss_sum(x, y) by the targets of all ranks"
            )
