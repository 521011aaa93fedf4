"""The base of data parallelism and every ZeRO stage: the loss, backward through the buckets, checks of a script.

While backward runs, a wrapper starts to reduce each bucket as soon as it is complete; a strategy says in `_reduce`
what that sends. Optimizers ask the wrapper before and after each update (`Parameter.owner`), so that a step before the
gradients have arrived, or an optimizer that holds the wrong parameters, is an error with a remedy.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minipar.autograd import Tensor, mapping, queue_callback
from minipar.backend import Array, to_host, xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.module import Module, Owner, Parameter, owners_of
from minipar.parallel.buckets import Bucket, Groups, make_buckets
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.placement import place
from minipar.parallel.state import gather_state


def global_mean(comm: Communicator, loss_sum: float, count: int) -> tuple[float, int]:
    """Return the mean loss over the targets of all ranks, and how many there are.

    A mean of the ranks' means would weigh a token on a rank with few of them more than one on a rank with many. Sends
    an all-reduce of two float64, added in rank order.
    """
    total = comm.all_reduce(np.array([loss_sum, count], dtype=np.float64), algorithm="ordered")
    return float(total[0] / max(1.0, total[1])), int(total[1])


class Wrapper(Owner, ABC):
    """A model whose gradients are summed over the ranks of `comm`; the base class of all data-parallel strategies.

    Microbatches add up in `gradient_dtype` (default: the parameters' dtype, but at least float32); gradients travel and
    are summed over ranks in `reduce_dtype` (default: gradient_dtype). NB: that of PyTorch's MixedPrecisionPolicy.
    """

    stage = 0  # of ZeRO

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str, groups: Groups, replicas: int = 1,
        gradient_dtype: Any = None, reduce_dtype: Any = None,
    ) -> None:  # fmt: skip
        if algorithm not in ("ring", "ordered"):  # the two whose bits depend on the rank count and the chunks alone
            raise ValueError(f'algorithm "{algorithm}": expected ring or ordered')
        self.model, self.comm, self.algorithm = model, comm, algorithm
        # ZeRO shards over shard_comm. With replicas, it sums the gradients of shards over replica_comm afterwards.
        levels: tuple[Communicator, Communicator | None] = (comm, None) if replicas == 1 else comm.levels(replicas)
        self.shard_comm, self.replica_comm = levels
        self.dtype = next(iter(model.parameters())).dtype
        # In which microbatches add up, and in which gradients travel and are summed over ranks.
        self.gradient_dtype = gradient_dtype or xp.promote_types(self.dtype, "float32")
        self.reduce_dtype = reduce_dtype or self.gradient_dtype
        for leaf in (leaf for p in model.parameters() for leaf in (p, *p.ties)):
            leaf.grad_dtype = self.gradient_dtype
        self.syncing = True  # False inside `no_sync`
        self._scaled = False  # inside a backward pass of a loss that was divided by the global count
        self._start_checked = False
        self._state = "none"  # of the gradients: none, local (not summed over the ranks yet), summed
        self.before_reduce: Callable[[Sequence[Parameter]], None] | None = None  # called before a bucket is reduced
        for owner in owners_of(model.parameters()):  # sequence parallelism's sum now comes before this wrapper's
            self.before_reduce = self.before_reduce or getattr(owner, "sum_partial", None)
        place(model)
        # In reverse parameter order, as backward completes them.
        self.buckets = make_buckets(groups, self.shard_comm, comm.rank // self.shard_comm.size)
        if replicas > 1 and any(bucket.comm is not self.shard_comm for bucket in self.buckets):
            raise UsageError(f"{replicas} replicas of shards: those of experts have none; give 1 replica or ep = 1")
        for p in model.parameters():
            p.owner = self
        self._bucket_of: dict[Tensor, int] = {}
        for i, bucket in enumerate(self.buckets):
            for leaf in bucket.leaves():
                self._bucket_of[leaf] = i
                leaf.register_post_accumulate_grad_hook(self._on_gradient)
        self._reset()

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer must receive, in the model's order: all parameters, or its shards."""
        return [p for bucket in reversed(self.buckets) for p in bucket.parameters]

    @abstractmethod
    def _reduce(self, bucket: Bucket) -> Work:
        """Start to sum a bucket's gradient over the ranks."""

    def _reset(self) -> None:
        self._works: list[Work] = []  # the reductions under way, one per bucket that has started
        self._across: list[Work] = []  # those over replicas
        self._sums: list[tuple[Array, Array]] = []  # sums that travel in another dtype, and where they belong
        self._waiting = [bucket.leaves() for bucket in self.buckets]  # those whose gradient is not complete yet

    def _on_gradient(self, leaf: Tensor) -> None:
        """Start every bucket that is complete; backward calls this when the gradient of `leaf` is complete.

        RuntimeError in a pass that nobody has scaled.
        """
        if not self._scaled:
            raise RuntimeError(
                f"backward() of a loss that was not divided by the global count of targets: over {self.comm.size} "
                f"ranks the gradients would add up to {self.comm.size} times too much. Use wrapper.loss(x, y) instead "
                "of model.loss(x, y), or scale the loss and run backward inside `with wrapper.scaled_backward():`"
            )
        self._state = "local"
        if not self.syncing:
            return
        self._waiting[self._bucket_of[leaf]].discard(leaf)
        # Buckets start strictly in order, so that all ranks issue the same collectives in the same order.
        while len(self._works) < len(self.buckets) and not self._waiting[len(self._works)]:
            self._start(self.buckets[len(self._works)])
        self.comm.progress()  # moves the buckets under way while backward goes on computing

    def _start(self, bucket: Bucket) -> None:
        bucket.complete()
        if self.before_reduce is not None:
            self.before_reduce(bucket.parameters)
        self._works.append(self._reduce(bucket))

    def _wire(self, gradient: Array) -> Array:
        """Return the array that travels: the gradient, or room in another dtype, which `synchronize` copies back."""
        if gradient.dtype == self.reduce_dtype:
            return gradient
        hold("buffers" if self.stage else "gradients", wire := xp.empty(gradient.shape, dtype=self.reduce_dtype))
        self._sums.append((wire, gradient))
        return wire

    def synchronize(self) -> None:
        """Start the buckets that backward has not completed, then wait until every gradient is the sum over all ranks.

        A parameter that the loss did not use counts as zero. `loss.backward()` calls this at its end.
        """
        for bucket in self.buckets[len(self._works) :]:
            self._start(bucket)
        for works in (self._works, self._across):  # the first ones start the second ones
            for work in works:
                work.wait()
        for wire, gradient in self._sums:
            gradient[...] = wire
        self._reset()
        self._state = "summed"

    def loss(self, x: Any, y: Any) -> Tensor:
        """Return the mean loss over the targets of all ranks, the same value on every rank; all ranks call it.

        Its backward gives the gradient of that mean, whatever share of the targets each rank holds, summed over the
        ranks before it returns (unless inside `no_sync`). Needs `model.loss_sum(x, y)`. All-reduces two float64.
        """
        self._scaled = False  # a backward pass that failed has left it True
        if not self._start_checked:
            self._check_start()
        loss_sum = self.model.loss_sum(x, y)
        mean, count = global_mean(self.comm, loss_sum.item(), self.model.target_count(y))

        def backward(grad: Array) -> Array:
            self.begin_backward()
            queue_callback(self.end_backward)
            return grad * xp.full_like(grad, 1 / max(1, count))

        return mapping(loss_sum, lambda total: xp.full_like(total, mean), backward)

    def _check_start(self) -> None:
        """Raise ValueError, once, if the ranks' models differ. Sends a checksum of each rank as control data."""
        self._start_checked = True
        for comm in dict.fromkeys(map(self.holders, self.buckets)):
            checksums = [self.checksum(bucket) for bucket in self.buckets if self.holders(bucket) is comm]
            if len(set(comm.all_gather_bytes(str(checksums).encode()))) > 1:
                why = "the ranks hold different parameters, and no wrapper copies one rank's to the others"
                remedy = "draw initial values by name (mp.Linear(..., name=...)) or from one seed, and load the same"
                raise ValueError(f"{why}: {remedy} state on all ranks")

    def holders(self, bucket: Bucket) -> Communicator:
        """Return the ranks that have a bucket's parameters: all, or those that hold the same experts."""
        return self.comm if bucket.comm is self.shard_comm else bucket.comm

    def checksum(self, bucket: Bucket) -> int:
        """Return the CRC-32 of a bucket's parameters before training, the same on ranks that start alike."""
        total = 0
        for p in bucket.parameters:
            total = zlib.crc32(to_host(p.data).view(np.uint8).data, total)
        return total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate full gradients and send none, in all microbatches of a step but the last."""
        previous, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = previous

    def begin_backward(self) -> None:
        """Note that a pass with the global scale begins. RuntimeError if it would add to gradients summed already."""
        if self._state == "summed" and self.stage < 2 and any(p.grad is not None for p in self.model.parameters()):
            why = "backward() would add to gradients that were summed over the ranks already, and sum them again"
            remedy = "run all microbatches of a step but the last inside `with wrapper.no_sync():`"
            raise RuntimeError(f"{why}: {remedy}, and call optimizer.zero_grad() before the next step")
        self._scaled = True

    def end_backward(self) -> None:
        """End a pass: sum the gradients over the ranks, unless inside `no_sync`. Each of several losses calls this."""
        if self._scaled and self.syncing:
            self.synchronize()
        self._scaled = False

    @contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Allow backward of a loss that the caller divided by the global count of targets. `synchronize` follows."""
        self.begin_backward()
        try:
            yield
        finally:
            self._scaled = False

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if an optimizer holds parameters of this model that this stage does not give it."""
        given = set(self.parameters())
        for p in parameters:
            if p.owner is self and p not in given:
                why = f"at ZeRO stage {self.stage} each rank updates its own shards"
                remedy = "write AdamW(wrapper.parameters()) instead of AdamW(model.parameters())"
                raise ValueError(f"the optimizer holds {p.placement.name}, but {why}: {remedy}")

    def before_step(self) -> None:
        """Raise RuntimeError if an optimizer steps before the gradients have been summed over the ranks."""
        if self._state == "local":
            remedy = "run the backward pass of the last microbatch outside `no_sync`"
            remedy += " (after scaled_backward: call wrapper.synchronize())"
            raise RuntimeError(f"optimizer.step() before the gradients were summed over the ranks: {remedy}")

    def forget_gradients(self) -> None:
        """Forget what was summed; `zero_grad` of a model or an optimizer calls it."""
        self._state = "none"

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.model.zero_grad()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Return the 2-norm of the whole gradient, the same on every rank; scale gradients down to `max_norm`.

        Sends one float64 at ZeRO stages 1 to 3, nothing otherwise. ValueError if other axes have placed the model.
        """
        self._check_only_dp("parallel.grad_norm.clip_grad_norm")
        if self._state != "summed":
            remedy = "call it after the backward pass of the last microbatch, outside `no_sync`"
            raise RuntimeError(f"clip_grad_norm() before the gradients were summed over the ranks: {remedy}")
        return clip_grad_norm(self.parameters(), max_norm, self.shard_comm)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the whole model on rank 0, as `gather_state` does. ValueError if other axes have placed the model."""
        self._check_only_dp("parallel.state.gather_state")
        return gather_state(self.model, self.parameters(), self.comm)

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return all values of a parameter. Stage 3 gathers them."""
        return parameter.data

    def _check_only_dp(self, function: str) -> None:
        if any(p.placement.tp.ranks > 1 or p.placement.pp > 0 for p in self.model.parameters()):
            raise ValueError(f"tensor or pipeline parallelism has placed this model too: call minipar.{function}")
