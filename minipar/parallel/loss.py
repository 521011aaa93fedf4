"""The loss of data parallelism: the mean over the targets of all ranks."""

from collections.abc import Callable

import numpy as np

from minipar.autograd.backward import queue_callback
from minipar.autograd.tensor import Tensor, mapping
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator


def global_mean_loss(
    loss_sum: Tensor,
    count: int,
    comm: Communicator,
    before_backward: Callable[[], None],
    after_backward: Callable[[], None],
) -> Tensor:
    """Return the mean loss over the targets of all ranks, on every rank; all ranks call it.

    `loss_sum` is this rank's sum over `count` targets. Each rank divides by the global count, so the
    ranks' gradients add up to that of this mean; in a mean of the ranks' means, a target of a rank
    with few would weigh more. All-reduces two float64. Backward calls `before_backward` first and
    `after_backward` last.
    """
    total = comm.all_reduce(np.array([loss_sum.item(), count]), algorithm="ordered")
    targets = max(1.0, total[1])

    def forward(local_sum: Array) -> Array:
        # The value is the mean of all ranks; the graph is this rank's.
        return xp.full_like(local_sum, total[0] / targets)

    def backward(grad: Array) -> Array:
        before_backward()
        queue_callback(after_backward)  # called when the whole backward pass ends
        return grad * xp.full_like(grad, 1 / targets)

    return mapping(loss_sum, forward, backward)
