"""The loss of data parallelism: the mean over the targets of all ranks."""

from collections.abc import Callable

import numpy as np

from minipar.autograd import Tensor, mapping, queue_callback
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.nn.module import Module, array_of


def global_mean(comm: Communicator, loss_sum: float, count: int) -> tuple[float, int]:
    """Return the mean loss over the targets of all ranks, and the number of these targets.

    In a mean of the ranks' means, a target of a rank with few would weigh more. All-reduces two float64.
    """
    total = comm.all_reduce(np.array([float(loss_sum), count]), algorithm="ordered")
    return float(total[0] / max(1.0, total[1])), int(total[1])


def global_mean_loss(
    model: Module, comm: Communicator, x: Array, y: Array,
    before_backward: Callable[[], None], after_backward: Callable[[], None],
) -> Tensor:  # fmt: skip
    """Return the mean loss over the targets of all ranks, on every rank; all ranks call it.

    Each rank divides by the global count, so the ranks' gradients add up to that of this mean. Backward
    calls `before_backward` first and `after_backward` last. The model has `loss_sum` and `target_count`.
    """
    y = array_of(y)
    loss_sum = model.loss_sum(x, y)
    mean, count = global_mean(comm, loss_sum.item(), model.target_count(y))

    def forward(local_sum: Array) -> Array:
        return xp.full_like(local_sum, mean)  # the value is the mean of all ranks; the graph is this rank's

    def backward(grad: Array) -> Array:
        before_backward()
        queue_callback(after_backward)  # called when the whole backward pass ends
        return grad * xp.full_like(grad, 1 / max(1, count))

    return mapping(loss_sum, forward, backward)
