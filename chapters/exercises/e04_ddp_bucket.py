"""Exercise 4 (chapter 4): a bucket of gradients.

In data parallelism the gradients of several parameters travel together. A Bucket has one flat buffer. Whenever
backward has completed a parameter's gradient, it calls `ready`, in any order. The call that completes the bucket
starts one all-reduce, and does not wait for it: backward goes on computing. `wait` ends it. A bucket is used again in
every step.

You need `comm.all_reduce(array, async_op=True)`: it returns a Work at once, and `work.wait()` returns the array, in
which the sum over the ranks has taken the place of the rank's own values.

Graded on 1, 2, 3 and 4 ranks, in two steps: the means; one all-reduce for each step, started by the last `ready` and
by no earlier one, and not waited for before `wait`.
"""

from collections.abc import Sequence

import numpy as np

from minipar.comm import Communicator


class Bucket:
    """Gradients that are averaged over the ranks in one all-reduce."""

    def __init__(self, comm: Communicator, sizes: Sequence[int]) -> None:
        """Make a bucket for parameters with that many elements each."""
        raise NotImplementedError("your code")

    def ready(self, parameter: int, gradient: np.ndarray) -> None:
        """Take the gradient, (sizes[parameter],), of a parameter. The last one starts the all-reduce."""
        raise NotImplementedError("your code")

    def wait(self) -> list[np.ndarray]:
        """Return each parameter's gradient, averaged over the ranks, in the order of `sizes`."""
        raise NotImplementedError("your code")
