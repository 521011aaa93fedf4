"""The gradients of the microbatches as the leaves of a tree, with `--reduction tree` (parallel/tree.py).

Replica r of d has the leaves r m to r m + m - 1 of d m, its m microbatches, so it adds a whole
subtree. Backward would add each microbatch's gradient to the sum of those before it. So after each
one the gradients are taken away, and after the last one the sums are put in their place, before
they are summed over the replicas.
"""

from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.memory import hold
from minipar.nn.parameter import Parameter
from minipar.parallel.parallelize import Parallelized
from minipar.parallel.pipeline.stage import TIED_GRADIENT
from minipar.parallel.tree import TreeSum


class LeafGradients:
    """The sums of the leaves' gradients on this rank, a TreeSum for each parameter.

    A tied token embedding has two leaves in each microbatch: the lookup's gradient and the head's.
    If a pipeline's last rank has the head, it keeps these gradients, and sends all of them to the
    first rank at the end: m V h elements in a step, where the other reductions send V h.
    """

    def __init__(self, strategies: Parallelized) -> None:
        self.strategies = strategies
        strategies.ddp.before_reduce = None  # `take` sums over tp, leaf by leaf; twice would be too often
        self.parameters: list[Parameter] = []
        for bucket in strategies.ddp.buckets:
            self.parameters += bucket.parameters
        self.sums: dict[Tensor, TreeSum] = {}
        self.lent: dict[int, Array] = {}  # the head's gradients, on a last rank without the token embedding

    def take(self, number: int) -> None:
        """Take the gradients that backward has computed for microbatch `number`, perhaps a part of them."""
        tensor = self.strategies.tensor
        assert tensor is not None, "trees have their own layers, on one rank too"
        for bucket in self.strategies.ddp.buckets:
            # With sequence parallelism some gradients are of a rank's own tokens.
            tensor.sum_partial(bucket.parameters)
        for p in self.parameters:
            for place, leaf in enumerate((p, *p.ties)):
                if leaf.grad is not None:
                    leaves = 1 + len(p.ties)
                    self.add(p, leaves * number + place, leaf.grad)
                    leaf.grad = None
        head = self.lent_head()
        if head is not None and head.grad is not None:
            self.lent[number] = head.grad
            head.grad = None

    def lent_head(self) -> Tensor | None:
        """Return the head's leaf of a token embedding that another rank of the pipeline updates."""
        pipeline = self.strategies.pipeline
        if pipeline is None or pipeline.comm.rank != pipeline.borrower:
            return None
        return pipeline.model.head_weight

    def add(self, parameter: Parameter, number: int, gradient: Array) -> None:
        """Add a leaf, which is copied: backward writes the next one into the same memory."""
        copy = gradient.copy()
        hold("buffers", copy)
        self.sums.setdefault(parameter, TreeSum()).add(number, copy)

    def finish(self, microbatches: int) -> None:
        """Put the sums where the strategy expects the gradients, once all microbatches are done."""
        self.fetch_tied_gradients(microbatches)
        for p in self.parameters:
            # A zero's sign depends on how many zeros were added: -0 + 0 is 0.
            p.accumulate(self.sums.pop(p).total() + 0)

    def fetch_tied_gradients(self, microbatches: int) -> None:
        """Send the head's gradients from the last rank of a pipeline to the first, which adds them as leaves."""
        pipeline = self.strategies.pipeline
        if pipeline is None or pipeline.borrower is None:
            return
        weight = pipeline.model.token_embedding
        if pipeline.comm.rank == pipeline.borrower:
            gradients = xp.stack([self.lent.pop(m) for m in range(microbatches)])
            pipeline.comm.isend(gradients, pipeline.first, TIED_GRADIENT).wait()
        elif pipeline.comm.rank == pipeline.first:
            gradients = xp.empty((microbatches, *weight.shape), dtype=weight.grad_dtype)
            pipeline.comm.irecv(gradients, pipeline.borrower, TIED_GRADIENT).wait()
            for m, gradient in enumerate(gradients):
                self.add(weight, 2 * m + 1, gradient)
