"""Exercise 7 (chapter 5): stage 3 gathers, uses and frees.

A network of L layers: the activation x becomes tanh(x @ weight) in each. Rank r has chunk r of each flat weight,
`chunk_bounds(h * h, d)[r]`, and its own samples. Compute the gradient of the ranks' summed losses, where a rank's
loss is ((output - target)**2).sum() / 2. Each rank needs only its chunk of each gradient. Before a layer computes, in
forward and again in backward, gather its weight. Afterwards free it: no variable, list or saved value may refer to
it, or to an array that shares its memory.

You need:
    comm.all_gather(chunk, out=array)   sets the flat `array` to the ranks' chunks, one after the other, and returns it
    comm.reduce_scatter(x)              returns chunk `comm.rank` of the sum of all ranks' flat x

Graded on 1 to 4 ranks: values; the whole weights alive at the same time, counted when they are gathered and freed: at
most two of L (one that is used and one on its way); bytes sent: 2 all-gathers and 1 reduce-scatter of each weight at
most.
"""

import numpy as np

from minipar.comm import Communicator, chunk_bounds


def gradients(comm: Communicator, shards: list[np.ndarray], x: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """Return this rank's chunk of each weight's gradient, summed over the ranks. x, target: (B, h) of this rank.

    With y = tanh(x @ w), the gradient g of y and u = g * (1 - y * y), the gradient of w is x.T @ u, that of x u @ w.T.
    """
    raise NotImplementedError("your code")
