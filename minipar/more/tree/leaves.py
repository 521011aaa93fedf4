"""The gradients of the microbatches as the leaves of trees (tree_sums.py).

Replica r of d has the leaves r m to r m + m - 1 of d m, its m microbatches, so it adds a whole subtree. Backward would
add each microbatch's gradient to the sum of those before it. So after each one the gradients are taken away, and after
the last one the sums are put in their place, before they are summed over the replicas.

Seams of the core: none. A trainer calls it after each backward, and leaves `before_reduce` to it.
"""

from collections.abc import Sequence

from minipar.autograd.tensor import Tensor
from minipar.backend import Array, xp
from minipar.memory import hold
from minipar.more.tree.tree_sums import TreeSum
from minipar.nn.parameter import Parameter
from minipar.parallel.pipeline.model import PipelineParallel
from minipar.parallel.pipeline.stage import TIED_GRADIENT
from minipar.parallel.tensor.plan import TensorParallel


class LeafGradients:
    """The sums of the leaves' gradients on this rank, a TreeSum for each parameter of the `buckets`.

    A tied token embedding has two leaves in each microbatch: the lookup's gradient and the head's. If a pipeline's last
    rank has the head, it keeps these gradients, and sends all of them to the first rank at the end: m V h elements in a
    step, where the other reductions send V h.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Parameter]],
        tensor: TensorParallel,
        pipeline: PipelineParallel | None,
    ) -> None:
        self.buckets = buckets
        self.tensor = tensor
        self.pipeline = pipeline
        self.sums: dict[Tensor, TreeSum] = {}
        # The head's gradients, on a last rank without the token embedding.
        self.lent: dict[int, Array] = {}

    def take(self, number: int) -> None:
        """Take the gradients that backward has computed for microbatch `number`, perhaps a part of them."""
        for bucket in self.buckets:
            self.tensor.sum_partial(bucket)  # with sequence parallelism some are of a rank's own tokens
            for p in bucket:
                for place, leaf in enumerate((p, *p.ties)):
                    if leaf.grad is not None:
                        leaves = 1 + len(p.ties)
                        self.add(p, leaves * number + place, leaf.grad)
                        leaf.grad = None
        if self.pipeline is not None and self.pipeline.comm.rank == self.pipeline.borrower:
            head = self.pipeline.model.head_weight
            if head is not None and head.grad is not None:
                self.lent[number] = head.grad
                head.grad = None

    def add(self, parameter: Parameter, number: int, gradient: Array) -> None:
        """Add a leaf, which is copied: backward writes the next one into the same memory."""
        copy = gradient.copy()
        hold("buffers", copy)
        self.sums.setdefault(parameter, TreeSum()).add(number, copy)

    def finish(self, microbatches: int) -> None:
        """Put the sums where the strategy expects the gradients, once all microbatches are done."""
        if self.pipeline is not None and self.pipeline.borrower is not None:
            self.fetch_tied_gradients(self.pipeline, self.pipeline.borrower, microbatches)
        for bucket in self.buckets:
            for p in bucket:
                # A zero's sign depends on how many zeros were added: -0 + 0 is 0.
                p.accumulate(self.sums.pop(p).total() + 0)

    def fetch_tied_gradients(self, pipeline: PipelineParallel, last: int, microbatches: int) -> None:
        """Send the head's gradients from the last rank of a pipeline to the first, which adds them as leaves."""
        weight = pipeline.model.token_embedding
        if pipeline.comm.rank == last:
            gradients = xp.stack([self.lent.pop(m) for m in range(microbatches)])
            pipeline.comm.isend(gradients, pipeline.first, TIED_GRADIENT).wait()
        elif pipeline.comm.rank == pipeline.first:
            gradients = xp.empty((microbatches, *weight.shape), dtype=weight.grad_dtype)
            pipeline.comm.irecv(gradients, last, TIED_GRADIENT).wait()
            for m, gradient in enumerate(gradients):
                self.add(weight, 2 * m + 1, gradient)
