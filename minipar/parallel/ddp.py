"""Data parallelism: each rank takes a share of the batch, and all ranks sum their gradients.

The loss is a sum divided by the *global* count of targets (loss.py), so the sum of the ranks' gradients
is the gradient of the global mean. Gradients are sent while backward runs.
"""

from collections.abc import Sequence

from minipar.comm.communicator import Communicator
from minipar.memory import hold
from minipar.nn.parameter import Parameter
from minipar.parallel.buckets import Bucket
from minipar.parallel.wrapper import DataParallel


class DistributedDataParallel(DataParallel):
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

    The algorithm "ordered" gives bit for bit the result of one device that runs the ranks' shares one
    after the other. The other arguments are DataParallel's. Of Psi parameters on d ranks, each rank
    sends 2 Psi (d-1)/d elements in a step.
    """

    def make_bucket(self, parameters: Sequence[Parameter], comm: Communicator) -> Bucket:
        bucket = Bucket(parameters, comm)
        for p in parameters:
            hold("parameters", p.data)  # notes it in the ledger of memory
        bucket.allocate_gradient("gradients")
        return bucket

    def reduce(self, bucket: Bucket) -> None:
        """Start the all-reduce of a bucket's gradients, in place."""
        work = bucket.comm.all_reduce(self.complete(bucket), algorithm=self.algorithm, async_op=True)
        self.works.append(work)
