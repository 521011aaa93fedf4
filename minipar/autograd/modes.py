"""Settings that hold inside a `with` block: the graph is recorded or not, keys of random operations."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from minipar.backend import setting

grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)
# Dropout sets these keys (nn/layers.py). A recomputed block draws with them again.
randomness: ContextVar[Any] = ContextVar("randomness", default=None)


def no_grad() -> AbstractContextManager[bool]:
    """Compute without recording a graph."""
    return setting(grad_enabled, False)
