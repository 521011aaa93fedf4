"""ZeRO stage 1 as an optimizer, for a model that no strategy wraps, such as a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minipar.backend import xp
from minipar.comm.communicator import Communicator
from minipar.memory import allocate
from minipar.nn.optim import Optimizer
from minipar.nn.parameter import Parameter, owners_of, zero_grad
from minipar.parallel.buckets import Bucket
from minipar.parallel.groups import Group, number_units
from minipar.parallel.guards import check_algorithm, check_communicator, check_is_replica, check_one_dtype
from minipar.parallel.shards import Chunk, all_shards
from minipar.parallel.step_guard import OptimizerGuard


class ZeroOptimizer:
    """ZeRO stage 1 as an optimizer, for a model that computes its gradients by itself.

        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp, lr=1e-3)
        loss = model(x, y)             # gradients of this replica's share of the global mean
        model.clip_grad_norm(1.0)      # if wanted: it sums them over dp already
        optimizer.step()               # sums them over dp, updates this rank's shard, gathers the parameters
        optimizer.zero_grad()

    `options` are the settings of the optimizer that is made, the attribute `optimizer`. `lr` can be
    read and set here, too. AttributeError for another setting, which would be ignored here: write
    `optimizer.optimizer.betas = ...`. `state_dict()` is that of this rank's shard. Sends
    2 Psi (d-1)/d elements per rank and step, none of it hidden behind computation. ValueError if
    the ranks of `comm` are not replicas, which hold the same parameters.
    """

    # Python refuses to set an attribute that is not in this list, so no setting is ignored.
    __slots__ = (
        "algorithm", "bucket", "chunk", "comm", "guard",
        "optimizer", "owners", "parameters", "shards", "values",
    )  # fmt: skip

    def __init__(
        self, parameters: Sequence[Parameter], optimizer: Callable[..., Optimizer], comm: Communicator,
        algorithm: str = "ring", **options: Any,
    ) -> None:  # fmt: skip
        check_communicator(comm)
        check_algorithm(algorithm)
        self.parameters, self.comm, self.algorithm = list(parameters), comm, algorithm
        self.owners = owners_of(self.parameters)  # such as tensor parallelism: they complete gradients first
        for owner in self.owners:
            owner.check_sum(comm)
        check_one_dtype(self.parameters)
        group = Group(self.parameters, comm, 0)
        number_units([group])
        self.bucket = Bucket(group, comm)
        self.values = allocate("parameters", self.bucket.size, self.parameters[0].dtype)
        for p, view in self.bucket.views(self.values):
            p.move_to(view)
            p.zero_grad()  # the first step's gradient would be added to it
        check_is_replica(comm, self.parameters)
        dtype = xp.promote_types(self.values.dtype, "float32")
        gradient = allocate("gradients", self.bucket.size, dtype)
        self.bucket.set_gradient(gradient)
        own = self.bucket.own
        self.chunk = Chunk(self.bucket, self.values[own], gradient[own])
        self.shards = all_shards({self.bucket: self.chunk})
        self.optimizer: Any = optimizer(self.shards, **options)
        self.guard = OptimizerGuard(self)

    @property
    def lr(self) -> float:
        """The learning rate, that of `optimizer`."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def sum_gradients(self) -> list[Parameter]:
        """Sum the gradients over the ranks, once in a step, and return this rank's shards."""
        self.guard.before_sum(self.optimizer)
        if self.guard.state != "summed":
            for owner in self.owners:
                owner.before_step(self.optimizer, self.parameters)
            gradient = self.bucket.complete()
            self.comm.reduce_scatter(gradient, out=self.chunk.gradient, algorithm=self.algorithm)
            self.chunk.accept_sums()
            self.guard.after_sum()
        return self.shards

    def step(self) -> None:
        """Sum the gradients, update this rank's shard, and gather the updated parameters."""
        self.guard.before_update()
        self.sum_gradients()
        self.optimizer.step()
        self.comm.all_gather(self.chunk.data, out=self.values, algorithm="pairwise")
        for owner in self.owners:
            owner.after_step()
        self.guard.after_update()

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        zero_grad(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state of this rank's shard; each rank saves its own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's `state_dict`. ValueError if the layout differs."""
        self.optimizer.load_state_dict(state)
