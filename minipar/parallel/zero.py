"""ZeRO stages 1 and 2: data parallelism without its redundancy (arXiv 1910.02054).

Plain data parallelism keeps everything on every rank. Each stage cuts one more kind of model state
into chunks, one per rank. Stages 1 and 2 send as much as data parallelism: an all-reduce is a
reduce-scatter followed by an all-gather, and the optimizer's update fits between the two.

    stage 1   optimizer state: each rank updates its own chunk, then all ranks gather the chunks
    stage 2   gradients too: a bucket's whole gradient exists only until it is reduce-scattered
    stage 3   parameters too (fsdp.py)
"""

from functools import partial

from minipar.parallel.chunks import ShardedBucket
from minipar.parallel.wrapper import DataParallel


class ZeroStage1(DataParallel):
    """Data parallelism with sharded optimizer state: each rank updates its chunk of the model.

    It is used like DistributedDataParallel. Rank r has chunk r of each bucket. `parameters()` returns its
    shards: AdamW keeps moments for 1/d of the model. In a step, each rank sends 2 Psi (d-1)/d
    elements.
    """

    make_bucket = partial(ShardedBucket, keeps_gradient=True)

    def reduce(self, bucket: ShardedBucket) -> None:
        """Start the reduce-scatter of a bucket's gradients; this rank gets its chunk of the sum."""
        gradient = self.complete(bucket)
        self.works.append(bucket.chunk.start_sum(gradient, self.algorithm))

    def after_sums(self) -> None:
        for bucket in self.buckets:
            bucket.chunk.accept_sum()

    def after_step(self) -> None:
        """Gather the chunks, which the ranks' optimizers have updated. Sends Psi (d-1)/d elements."""
        works = [bucket.chunk.start_gather(bucket.values) for bucket in reversed(self.buckets)]
        for work in works:
            work.wait()


class ZeroStage2(ZeroStage1):
    """Data parallelism with sharded gradients, too: a whole gradient exists only until it is sent.

    At most two exist at a time: backward writes one while the other is sent. The gradient of the matrix
    that embedding and head share is one array more. Microbatches that accumulate under `no_sync` keep the
    whole gradients of all buckets, as in PyTorch's FSDP. With `synchronize` after each microbatch,
    gradients stay sharded, and each microbatch sends them. Without that it sends as much as stage 1.
    """

    make_bucket = partial(ShardedBucket, keeps_gradient=False)

    def reduce(self, bucket: ShardedBucket) -> None:
        """Start the sum as stage 1 does. Then the message alone refers to the whole gradient."""
        super().reduce(bucket)
        bucket.free_gradient()
