"""Buckets: parameters whose gradients travel in one message, as soon as they are complete.

All gradients of a bucket lie in one flat array. Backward writes them, the collective reads them.
A group is what becomes a bucket: parameters, and the ranks that hold them and sum their gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from minipar.autograd.tensor import Tensor
from minipar.backend import Array, xp
from minipar.comm.algorithms import chunk_bounds
from minipar.comm.communicator import Communicator
from minipar.memory import allocate
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import BucketSlice, update

Group = tuple[Sequence[Parameter], Communicator]


def by_unit(model: Module) -> list[list[Parameter]]:
    """Group the parameters that are used together; FSDP gathers one such unit at a time.

    GPT: one group for each block, and one, the first, for the embedding and the head, which share
    the token embedding. A model without segments is one unit.
    """
    units: list[list[Parameter]] = []
    for segment in getattr(model, "segments", []):
        new = [p for p in segment.parameters if not any(p in unit for unit in units)]
        shared = [unit for unit in units if set(unit) & set(segment.parameters)]
        if shared:
            shared[0] += new
        elif new:
            units.append(new)
    return units or [model.parameters()]


class Bucket:
    """Parameters whose gradients travel together over `comm`. Making one records each parameter's place in it."""

    def __init__(self, parameters: Sequence[Parameter], comm: Communicator) -> None:
        self.parameters = list(parameters)
        self.updated = self.parameters  # by this rank's optimizer: ZeRO has shards in their place
        self.comm = comm
        self.size = sum(p.size for p in parameters)
        self.gradient_dtype = xp.promote_types(parameters[0].dtype, "float32")
        self.gradient: Array | None = None  # the flat array that backward writes into, while there is one
        # ZeRO's chunk r belongs to rank r of these: all of `comm`, or with hybrid sharding one group of them.
        sharing = comm.chunk_comm
        self.own = slice(*chunk_bounds(self.size, sharing.size)[sharing.rank])
        replica = comm.rank // sharing.size
        start = 0
        for p in parameters:
            p.zero_grad()  # the first step's gradients are not added to older ones
            update(p, dp=BucketSlice(start, p.size, self.size, sharing.rank, sharing.size, replica))
            start += p.size
        for leaf in self.leaves():
            leaf.grad_dtype = self.gradient_dtype  # sums of 2 bytes would be too coarse

    def views(self, flat: Array) -> Iterator[tuple[Parameter, Array]]:
        """Yield each parameter with the part of `flat` that belongs to it, in the parameter's shape."""
        start = 0
        for p in self.parameters:
            yield p, flat[start : start + p.size].reshape(p.shape)
            start += p.size

    def flatten_values(self, kind: str) -> Array:
        """Move the parameters into one flat array, which is returned."""
        values = allocate(kind, self.size, self.parameters[0].dtype)
        for p, view in self.views(values):
            p.move_to(view)
        return values

    def leaves(self) -> set[Tensor]:
        """Return every tensor whose gradient the bucket waits for: the parameters, and the leaves tied to them."""
        return {leaf for p in self.parameters for leaf in (p, *p.ties)}

    def allocate_gradient(self, kind: str) -> Array:
        """Allocate the flat array that backward writes, unless there is one; copy the gradients that have arrived."""
        if self.gradient is not None:
            return self.gradient
        self.gradient = allocate(kind, self.size, self.gradient_dtype)
        for p, view in self.views(self.gradient):
            if p.grad is not None:
                view[...] = p.grad
                p.grad = view
            p.grad_buffer = view  # backward writes p's gradient here
        return self.gradient

    def complete(self) -> Array:
        """Add the gradients of tied leaves, write zeros for parameters without a gradient; return the flat array."""
        gradient = self.allocate_gradient("buffers")  # if backward has not come to the bucket
        for p, view in self.views(gradient):
            p.fold_tied_gradients()
            if p.grad is None:
                view[...] = 0
                p.grad = view
        return gradient

    def free_gradient(self) -> None:
        """Forget the flat array, which is freed when its collective has ended."""
        self.gradient = None
        for p in self.parameters:
            p.grad = p.grad_buffer = None


class BackwardHooks:
    """Calls `send(bucket)` for each bucket as soon as backward has completed it and all buckets before it.

    `prepare()` is called at each gradient that arrives, and when backward goes on after a send.
    """

    def __init__(
        self, buckets: Sequence[Bucket], prepare: Callable[[], None], send: Callable[[Any], None]
    ) -> None:
        self.buckets = buckets
        self.prepare = prepare
        self.send = send
        self.enabled = True  # False inside `no_sync`
        for bucket in buckets:
            for leaf in bucket.leaves():
                leaf.register_post_accumulate_grad_hook(partial(self.on_gradient, bucket))
        self.start_again()

    def start_again(self) -> None:
        """Mark every bucket as unsent and every gradient as missing, for the next pass."""
        self.unsent = list(self.buckets)
        # The leaves of each bucket that have no gradient yet.
        self.incomplete = {bucket: bucket.leaves() for bucket in self.buckets}

    def on_gradient(self, bucket: Bucket, leaf: Tensor) -> None:
        """Send the buckets that are complete. Backward calls this when the gradient of `leaf` is complete."""
        if bucket not in self.unsent:
            raise RuntimeError(
                "backward() would add to gradients that are being summed over the ranks: run all microbatches "
                "of a step but the last inside `with wrapper.no_sync():` (after a pass that failed: "
                "wrapper.synchronize(), then zero_grad())"
            )
        self.prepare()
        if not self.enabled:
            return
        self.incomplete[bucket].discard(leaf)
        # A complete bucket waits for those before it, so that all ranks start their collectives in one order.
        while self.unsent and not self.incomplete[self.unsent[0]]:
            self.send(self.unsent.pop(0))
            self.prepare()
        bucket.comm.progress()  # moves the messages under way; then backward goes on computing

    def finish(self) -> None:
        """Send the remaining buckets, with zeros for what the loss did not use, and start again for the next pass."""
        for bucket in self.unsent:
            self.send(bucket)
        self.start_again()
