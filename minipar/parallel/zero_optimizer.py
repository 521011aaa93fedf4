"""ZeRO stage 1 as an optimizer, for a model that no strategy wraps, such as a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minipar.autograd.modes import grad_enabled
from minipar.autograd.tensor import Tensor
from minipar.comm.communicator import Communicator
from minipar.nn.optim import Optimizer, check_gradients
from minipar.nn.parameter import Owner, Parameter, owners_of, zero_grad
from minipar.parallel.chunks import Chunk, ShardedBucket
from minipar.parallel.contract import FORGOTTEN, check_groups


class ZeroOptimizer(Owner):
    """ZeRO stage 1 as an optimizer, for a model that computes its gradients by itself.

        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp, lr=1e-3)
        loss = model(x, y)             # gradients of this replica's share of the global mean
        clip_grad_norm(model.parameters(), 1.0, mesh.dp, mesh.tp, mesh.pp)     # if wanted: sums them over dp already
        optimizer.step()               # sums them over dp, updates this rank's shard, gathers the parameters
        optimizer.zero_grad()

    `options` are the settings of the optimizer that is made, the attribute `optimizer`; `lr` can be
    read and set here, too. `state_dict()` is that of this rank's shard. Sends 2 Psi (d-1)/d elements
    per rank and step, none of it hidden behind computation. UsageError if the ranks of `comm` are
    not replicas, which hold the same parameters.
    """

    def __init__(
        self, parameters: Sequence[Parameter], optimizer: Callable[..., Optimizer], comm: Communicator,
        algorithm: str = "ring", **options: Any,
    ) -> None:  # fmt: skip
        self.parameters = list(parameters)
        self.comm = comm
        self.algorithm = algorithm
        # Other owners, such as tensor parallelism, complete the gradients before they are summed.
        self.owners = owners_of(self.parameters)
        check_groups([(self.parameters, comm)], is_complete=True)
        self.bucket = ShardedBucket(self.parameters, comm)
        self.bucket.move_values()
        own = self.bucket.own
        self.chunk = Chunk(self.bucket, self.bucket.values[own], self.bucket.allocate_gradient()[own])
        self.optimizer: Any = optimizer(self.chunk.shards, **options)
        self.state = "none"  # gradients are none or local, summed over the ranks, or stepped
        for p in self.parameters:
            p.owners.append(self)
            for leaf in (p, *p.ties):
                leaf.register_post_accumulate_grad_hook(self.on_gradient)

    @property
    def lr(self) -> float:
        """The learning rate, that of `optimizer`."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def sum_gradients(self) -> list[Parameter]:
        """Sum the gradients over the ranks, once in a step, and return this rank's shards."""
        if self.state == "none":
            check_gradients(self.parameters)
            for owner in self.owners:
                owner.before_step(self.parameters)
            self.comm.reduce_scatter(
                self.bucket.complete(), out=self.chunk.gradient, algorithm=self.algorithm
            )
            self.chunk.accept_sums()
            self.state = "summed"
        return self.chunk.shards

    def step(self) -> None:
        """Sum the gradients, update this rank's shard, and gather the updated parameters."""
        if self.state == "stepped":
            raise RuntimeError("optimizer.step() twice for one backward(): call zero_grad() in between")
        self.sum_gradients()
        self.optimizer.step()
        self.comm.all_gather(self.chunk.data, out=self.bucket.values, algorithm="pairwise")
        for owner in self.owners:
            owner.after_step()
        self.state = "stepped"

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        zero_grad(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state of this rank's shard; each rank saves its own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's `state_dict`. ValueError if the layout differs."""
        self.optimizer.load_state_dict(state)

    # ---- refusals: as an owner of the parameters

    def on_gradient(self, leaf: Tensor) -> None:
        """Raise RuntimeError if backward has added to gradients that were summed or used already."""
        if self.state == "stepped":
            raise RuntimeError(FORGOTTEN)
        if self.state == "summed":
            raise RuntimeError(
                "backward() would add to summed gradients: clip after the last backward of a step"
            )

    def before_mean_loss(self) -> None:
        """Raise RuntimeError if a script computes a rank's own mean, to train on it."""
        if self.comm.size > 1 and grad_enabled.get():
            why = f"ZeroOptimizer would add up the gradients of {self.comm.size} ranks' means"
            raise RuntimeError(f"{why}: divide model.loss_sum(x, y) by the targets of all ranks")

    def check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError: another optimizer would update the parameters a second time."""
        raise ValueError("a ZeroOptimizer updates these parameters already: call its step() alone")

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise ValueError: a second sum over ranks would count gradients several times."""
        self.check_optimizer(parameters)

    def forget_gradients(self) -> None:
        """Forget what was summed; `zero_grad` of a model calls it, too."""
        self.state = "none"
        for shard in self.chunk.shards:
            shard.grad = None
