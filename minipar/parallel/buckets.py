"""Buckets: parameters whose gradients travel in one message, as soon as they are complete.

All gradients of a bucket lie in one flat array. Backward writes them, the collective reads them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from minipar.autograd import Tensor
from minipar.backend import Array
from minipar.comm.algorithms import chunk_bounds
from minipar.nn.parameter import Parameter
from minipar.parallel.groups import Group
from minipar.parallel.guards import checksum
from minipar.parallel.hybrid import GradientComm
from minipar.parallel.placement import BucketSlice, update


class Bucket:
    """Parameters whose gradients travel together over `comm`. To make a bucket records their place in it."""

    def __init__(self, group: Group, comm: GradientComm, replica: int = 0) -> None:
        self.parameters = tuple(group.parameters)
        self.holders = group.comm  # the ranks that hold these parameters
        self.comm = comm  # their collectives, perhaps in another dtype or in two steps (hybrid.py)
        self.size = sum(p.size for p in self.parameters)
        # ZeRO's: the chunk that this rank owns.
        self.own = slice(*chunk_bounds(self.size, comm.size)[comm.rank])
        self.gradient: Array | None = None  # the flat array that backward writes into, while there is one
        start = 0
        for p in self.parameters:
            update(p, dp=BucketSlice(start, p.size, self.size, comm.rank, comm.size, replica))
            start += p.size

    def views(self, flat: Array) -> Iterator[tuple[Parameter, Array]]:
        """Yield each parameter with the part of `flat` that belongs to it, in the parameter's shape."""
        start = 0
        for p in self.parameters:
            yield p, flat[start : start + p.size].reshape(p.shape)
            start += p.size

    def leaves(self) -> set[Tensor]:
        """Return every tensor whose gradient the bucket waits for: the parameters, and the leaves tied to them."""
        return set().union(*[(p, *p.ties) for p in self.parameters])

    def checksum(self) -> int:
        """Return the CRC-32 of the parameters' values."""
        return checksum(*[p.data for p in self.parameters])

    def set_gradient(self, flat: Array) -> None:
        """Let backward write the gradients into `flat`, and copy those that have arrived already."""
        self.gradient = flat
        for p, view in self.views(flat):
            if p.grad is not None:
                view[...] = p.grad
                p.grad = view
            p.grad_buffer = view  # backward writes p's gradient here

    def complete(self) -> Array:
        """Add the gradients of tied leaves, write zeros for parameters without a gradient; return the flat array."""
        assert self.gradient is not None
        for p, view in self.views(self.gradient):
            p.fold_tied_gradients()
            if p.grad is None:
                view[...] = 0
                p.grad = view
        return self.gradient

    def drop_gradient(self) -> None:
        """Drop the references to the flat array, which is freed when its collective has ended."""
        self.gradient = None
        for p in self.parameters:
            p.grad = p.grad_buffer = None


class BackwardHooks:
    """Calls `send(bucket)` for each bucket as soon as backward has completed it and all buckets before it."""

    def __init__(
        self, buckets: Sequence[Bucket], send: Callable[[Bucket], None], progress: Callable[[], None]
    ) -> None:
        self.buckets = buckets
        self.send = send
        self.progress = progress
        self.enabled = True  # False inside `no_sync`
        for bucket in buckets:
            for leaf in bucket.leaves():
                leaf.register_post_accumulate_grad_hook(partial(self.on_gradient, bucket))
        self.start_again()

    def start_again(self) -> None:
        """Mark every bucket as unsent and every gradient as missing, for the next pass."""
        self.has_gradients = False  # True from the first gradient that arrives until the next `finish`
        self.unsent = list(self.buckets)
        self.incomplete = {bucket: bucket.leaves() for bucket in self.buckets}  # leaves without a gradient

    def on_gradient(self, bucket: Bucket, leaf: Tensor) -> None:
        """Send the buckets that are complete. Backward calls this when the gradient of `leaf` is complete."""
        self.has_gradients = True
        if not self.enabled:
            return
        self.incomplete[bucket].discard(leaf)
        # A complete bucket waits for those before it, so that all ranks start their collectives in one order.
        while self.unsent and not self.incomplete[self.unsent[0]]:
            self.send(self.unsent.pop(0))
        self.progress()  # moves the messages under way; then backward goes on computing

    def finish(self) -> None:
        """Send the remaining buckets, with zeros for the parameters that the loss did not use."""
        for bucket in self.unsent:
            self.send(bucket)
        self.start_again()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients and send none."""
        previous = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = previous
