"""Exercise 18 (chapter 12): gradients and their norm with expert parallelism.

Of the d ranks of data parallelism, P neighbours share the experts. `mesh.dp` has all d ranks, `mesh.ep` the P ranks
that together hold all experts, and `mesh.edp` the d/P ranks that hold the same ones as this rank.

After backward this rank has two gradients, both of a *sum* of losses: `shared`, of the parameters that all ranks hold,
covers this rank's tokens. `experts`, of this rank's experts, covers the tokens of the P ranks of `mesh.ep`, because
their rows came here. `tokens` is the number of this rank's tokens.

Return both gradients of the *mean* loss over the tokens of all d ranks, and the norm of the whole model's gradient, in
which each parameter of the model counts once.

`communicator.all_reduce(array)` replaces the array by the sum over its ranks, and returns it.

Graded on 1 to 6 ranks: both gradients and the norm, which are those of one device.
"""

import numpy as np

from minipar.comm import DeviceMesh


def mean_gradients(
    mesh: DeviceMesh, shared: np.ndarray, experts: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the gradients of the mean, in the shapes of `shared` (n,) and of `experts` (m,), and the norm."""
    raise NotImplementedError("your code")
