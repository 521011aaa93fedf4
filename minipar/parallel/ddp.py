"""Data parallelism: every rank holds the whole model, takes a share of the batch, and all ranks sum their gradients.

A bucket of gradients starts to travel as soon as backward has completed it (wrapper.py). The loss is a sum over targets
divided by the *global* count, so the ranks' gradients add up to the gradient of the global mean, whatever share each
rank holds.
"""

from typing import Any

from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.nn.module import Module
from minipar.parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBuffers, Groups, by_size
from minipar.parallel.wrapper import Wrapper


class DistributedDataParallel(Wrapper):
    """A model whose gradients are all-reduced over `comm` in buckets, while backward runs (Li et al. 2020, 2006.15704).

        ddp = DistributedDataParallel(model, comm)
        optimizer = AdamW(ddp.parameters())

        loss = ddp.loss(x, y)      # the mean over the targets of all ranks
        loss.backward()            # buckets are sent in here; afterwards every p.grad is the gradient of that mean
        optimizer.step()
        optimizer.zero_grad()

        with ddp.no_sync():        # microbatches before the last only accumulate
            (ddp.loss(x1, y1) / 2).backward()
        (ddp.loss(x2, y2) / 2).backward()

    Parameters move into flat buffers. Buckets hold `bucket_bytes` (the first to travel `first_bucket_bytes`), or the
    parameters of one of `groups`, which list all parameters in the model's order. `algorithm` is "ring", or "ordered"
    to add the ranks' gradients in rank order, which gives the bits of one device that accumulates the ranks' shards.
    `options` are the Wrapper's: gradient_dtype and reduce_dtype.
    Sends 2 Psi (d-1)/d elements per rank and step, however many microbatches there are.
    """

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        algorithm: str = "ring",
        *,
        groups: Groups | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        **options: Any,
    ) -> None:
        if groups is None:
            groups = by_size(model.parameters(), bucket_bytes, first_bucket_bytes)
        super().__init__(model, comm, algorithm, groups, **options)
        self.buffers = FlatBuffers(self.buckets, self.gradient_dtype)

    def _reduce(self, bucket: Bucket) -> Work:
        """Start to sum a bucket's gradient over the ranks, in place."""
        gradients = self.buffers.gradients[bucket.start : bucket.stop]
        wire = self._wire(gradients)
        if wire is not gradients:
            wire[...] = gradients
        return bucket.comm.all_reduce(wire, algorithm=self.algorithm, async_op=True)
