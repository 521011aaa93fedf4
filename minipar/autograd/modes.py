"""Settings that hold inside a `with` block: the graph is recorded or not, keys of random operations, documents."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import numpy as np

from minipar.backend import setting

grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
# Dropout sets these keys (nn/layers.py). A recomputed block draws with them again.
randomness: ContextVar[object] = ContextVar("randomness", default=None)
# Each token's position in its document, in samples that hold several (documents.py). A recomputed
# block has them again.
position_ids: ContextVar[np.ndarray | None] = ContextVar("position_ids", default=None)


def no_grad() -> AbstractContextManager[bool]:
    """Compute without recording a graph."""
    return setting(grad_enabled, False)
