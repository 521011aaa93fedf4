"""Shared by all tests. minipar comes first: it sets one BLAS thread before NumPy is loaded, as every rank does."""

import minipar  # isort: skip  # noqa: F401
import numpy as np
import pytest

from minipar import backend


@pytest.fixture(autouse=True)
def numpy_again():
    """The array module is the whole process's: a test that leaves another one behind fails, and spoils no other."""
    yield
    left, _ = backend.xp.module, backend.use(np)
    assert left is np, f"the test left {left} as the array module"
