"""Exercise 19 (chapter 13): an optimizer step with loss scaling, over ranks.

The loss was multiplied by `scale` before backward, so `gradient`, this rank's, in float16, is `scale` times too large,
and it may have infinities or NaN. The gradient of the step is the sum over the ranks. As in ZeRO, this rank updates
only its chunk of the weights, and `master` is that chunk, in float32.

Add up the ranks' gradients in float32, take the scale out again, and update: master - lr * gradient. But if the sum has
an infinity or a NaN *anywhere*, no rank may update anything. Return the new master, the scale of the next step, and how
many good steps there were since the scale changed: a skipped step halves the scale, and the 2000th good step in a row
doubles it; both start to count again at 0. `good` is the number before this step.

You need `comm.reduce_scatter(array)`, which returns this rank's chunk of the sum over the ranks, in the array's dtype,
and `comm.all_reduce(array, op="max")`, which replaces the array by the largest of the ranks' values, and returns it.

Graded on 1 to 4 ranks: weights, scale and count on every rank.
"""

import numpy as np

from minipar.comm import Communicator


def scaled_step(
    comm: Communicator, master: np.ndarray, gradient: np.ndarray, scale: float, good: int, lr: float
) -> tuple[np.ndarray, float, int]:
    """Return this rank's new master, the next scale, and the good steps. gradient: (n,); master: this rank's chunk."""
    raise NotImplementedError("your code")
