"""Exercise 24 (chapter 5): a step of hybrid sharding.

There are q hosts of s ranks. Each host holds the whole model: the rank at place i of a host has chunk i of the n flat
parameters, `chunk_bounds(n, s)[i]`, and the same chunk of the optimizer's velocity. Ranks at the same place of all
hosts hold the same. A step

1. gathers the parameters inside the host, and computes with them the gradient of this rank's own samples,
2. leaves on each rank its chunk of the gradient's *mean over all q s ranks*,
3. clips it: with norm the norm of the whole mean gradient, all n elements, it becomes gradient * limit / norm if norm >
   limit,
4. updates the rank's chunks: velocity = 0.9 velocity + gradient, then parameters = parameters - 0.1 velocity.

You need, of `inside` (the s ranks of this host, in order) and of `between` (the q ranks at this place of all hosts):
    comm.rank, comm.size
    comm.all_gather(chunk, out=array)   sets `array` to the ranks' chunks in order
    comm.reduce_scatter(x)              returns chunk `comm.rank` of the sum of all ranks' x
    comm.all_reduce(array)              replaces the array by the sum over its ranks, and returns it

Graded for 1 to 6 ranks, in three steps: the chunks, which are those of one device to 1e-12. The elements that all ranks
send, with ==: inside, for each host, 2 n (s - 1), and 2 (s - 1) for one value; between, 2 n (q - 1).
"""

from collections.abc import Callable

import numpy as np

from minipar.comm import Communicator, chunk_bounds


def step(
    inside: Communicator,
    between: Communicator,
    parameters: np.ndarray,
    velocity: np.ndarray,
    n: int,
    gradient_of: Callable[[np.ndarray], np.ndarray],
    limit: float,
) -> None:
    """Change this rank's chunks of parameters and velocity in place.

    gradient_of(whole) returns the gradient (n,) of this rank's mean loss; whole: (n,), all parameters. Call it once.
    """
    raise NotImplementedError("your code")
