"""Data parallelism: each rank takes a share of the batch, and all ranks sum their gradients.

The loss is a sum divided by the *global* count of targets (loss.py), so the sum of the ranks' gradients
is the gradient of the global mean. NaiveDataParallel sends after backward, the other class during it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.memory import allocate, hold
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import BackwardHooks, Bucket
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.groups import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Group,
    by_size,
    groups_over,
    place_groups,
)
from minipar.parallel.guards import check_wrapping, refuse_late_state
from minipar.parallel.hybrid import Pending, in_dtype, set_gradient_dtype
from minipar.parallel.loss import global_mean_loss
from minipar.parallel.state import gather_state
from minipar.parallel.step_guard import Guard


class NaiveDataParallel:
    """Data parallelism in its plainest form: one all-reduce per parameter, after backward."""

    def __init__(self, model: Module, comm: Communicator, algorithm: str = "ring") -> None:
        self.model = model
        self.comm = comm
        self.algorithm = algorithm

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets of all ranks; backward leaves its gradient in each `p.grad`."""
        return global_mean_loss(self.model, self.comm, x, y, self.model.zero_grad, self.sum_gradients)

    def sum_gradients(self) -> None:
        """Sum each gradient over the ranks. A parameter that the loss did not use counts with a gradient of zero."""
        for p in self.model.parameters():
            p.fold_tied_gradients()
            p.grad = xp.zeros_like(p.data) if p.grad is None else xp.ascontiguousarray(p.grad)
            self.comm.all_reduce(p.grad, algorithm=self.algorithm)


class DistributedDataParallel:
    """A model whose gradients are all-reduced in buckets while backward runs (arXiv 2006.15704).

        ddp = DistributedDataParallel(model, comm)
        optimizer = AdamW(ddp.parameters())
        loss = ddp.loss(x, y)      # the mean over the targets of all ranks
        loss.backward()            # sends the buckets; every p.grad is then the gradient of that mean
        optimizer.step()
        optimizer.zero_grad()

        with ddp.no_sync():        # microbatches before the last only accumulate
            (ddp.loss(x1, y1) / 2).backward()
        (ddp.loss(x2, y2) / 2).backward()

    The algorithm "ordered" gives the bits of one device that accumulates the ranks' shares. Each of
    `groups` becomes a bucket; without them, buckets are filled to `bucket_bytes`, the first one to
    `first_bucket_bytes`. `before_reduce(parameters)` is called before each all-reduce. Gradients add
    up in `gradient_dtype` (float32 at least). A step sends 2 Psi (d-1)/d elements in `reduce_dtype`.
    """

    # The guard refuses a second pass with a sum: it would sum the first pass's sum again.
    accumulates_sums = False

    def __init__(
        self, model: Module, comm: Communicator, algorithm: str = "ring", *,
        groups: Sequence[Group] | None = None,
        bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        before_reduce: Callable[[Sequence[Parameter]], None] | None = None,
        gradient_dtype: DTypeLike | None = None, reduce_dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        check_wrapping(model, comm, algorithm)
        self.model = model
        self.comm = comm
        self.algorithm = algorithm
        self.before_reduce = before_reduce
        self.norm_comm = comm  # the ranks of the norm, as in ZeRO; here each has the whole gradient
        if groups is None:
            groups = groups_over(comm, by_size(model.parameters(), bucket_bytes, first_bucket_bytes))
        place_groups(model, comm, groups, before_reduce)
        self.gradient_dtype = dtype = set_gradient_dtype(model, gradient_dtype)
        # Backward completes the last parameters first, so the last group is the first bucket to be sent.
        self.buckets = [
            Bucket(group, in_dtype(group.comm, reduce_dtype, dtype)) for group in reversed(groups)
        ]
        for bucket in self.buckets:
            for p in bucket.parameters:
                hold("parameters", p.data)
            bucket.set_gradient(allocate("gradients", bucket.size, dtype))
        self.guard = Guard(self)  # its hooks run before those that send, so that it refuses first
        self.hooks = BackwardHooks(self.buckets, self.reduce, comm.progress)
        self.works: list[Pending] = []  # the all-reduces under way

    def __call__(self, *inputs: Array) -> Tensor:
        return self.model(*inputs)

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer must receive: all parameters, in the model's order."""
        return [p for bucket in reversed(self.buckets) for p in bucket.parameters]

    def loss(self, x: Array, y: Array) -> Tensor:
        """Return the mean loss over the targets of all ranks. All ranks call it; see loss.py."""
        self.guard.before_loss(x, y)
        return global_mean_loss(self.model, self.comm, x, y, self.guard.before_backward, self.after_backward)

    def reduce(self, bucket: Bucket) -> None:
        """Start the all-reduce of a bucket's gradients, in place, and return at once, so that backward goes on."""
        gradient = bucket.complete()
        if self.before_reduce is not None:
            self.before_reduce(bucket.parameters)
        self.works.append(bucket.comm.all_reduce(gradient, algorithm=self.algorithm, async_op=True))

    def after_backward(self) -> None:
        """Finish the sum, unless inside `no_sync`. Each loss of a pass queues this; later calls find no gradients."""
        if self.hooks.enabled and self.hooks.has_gradients:
            self.synchronize()

    def synchronize(self) -> None:
        """Send the remaining buckets; wait until every gradient is the sum over all ranks. Backward ends with this."""
        self.hooks.finish()
        for work in self.works:
            work.wait()
        self.works = []
        self.guard.after_sum()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward accumulate and send nothing: for all microbatches but the last."""
        return self.hooks.no_sync()

    def scaled_backward(self) -> AbstractContextManager[None]:
        """Allow backward of a loss that the caller has scaled; call `synchronize` afterwards."""
        return self.guard.scaled_backward()

    def zero_grad(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.model.zero_grad()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Return the whole gradient's 2-norm; scale a gradient of a larger norm down to `max_norm`. Sends nothing."""
        self.guard.before_norm()
        return clip_grad_norm(self.parameters(), max_norm, self.comm)

    def after_step(self) -> None:
        """Do nothing: the optimizer of every rank has updated all parameters alike."""

    def replicas(self) -> list[tuple[Communicator, Sequence[Parameter]]]:
        """Return, for each bucket, the ranks that hold the same values of its parameters."""
        return [(bucket.holders, bucket.parameters) for bucket in self.buckets]

    def gather_parameter(self, parameter: Parameter) -> Array:
        """Return all values of a parameter. This rank has them."""
        return parameter.data

    def state_dict(self) -> dict[str, np.ndarray]:
        """Collect the whole model on rank 0, as `gather_state` does."""
        self.guard.before_state()
        return gather_state(self.model, self.parameters(), self.comm)

    load_state_dict = refuse_late_state  # the model's `load_state_dict` comes before the wrapper
