"""Shared by all tests. Every test process is set up as a rank is: with one BLAS thread."""

import gc
import threading

import numpy as np
import pytest

from minipar import backend
from minipar.process import prepare_process

prepare_process()
LOADING = threading.Lock()
load = np.load


def load_alone(*args, **options):
    """Read an array. The parser of its header is not safe in threads before Python 3.11.8 (cpython issue 106905)."""
    with LOADING:
        return load(*args, **options)


np.load = load_alone
gc.disable()  # until the tests are collected: they are all kept


def pytest_collection_finish():
    """Take what was collected out of the garbage collector's sight: walking through it takes a tenth of the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def numpy_again():
    """The array module is the whole process's: a test that leaves another one behind fails, and spoils no other."""
    yield
    left, _ = backend.xp.module, backend.use(np)
    assert left is np, f"the test left {left} as the array module"


START = {}  # of each generator: its state before the first test


@pytest.fixture(autouse=True)
def random_values_of_its_own(request):
    """A test draws the same values from its file's generator, RANDOM, whichever tests have run before it."""
    generator = getattr(request.module, "RANDOM", None)
    if generator is not None:
        state = START.setdefault(id(generator), generator.bit_generator.state)
        generator.bit_generator.state = state


def cupy_module():
    import cupy

    try:
        found = cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        found = False
    return cupy if found else pytest.skip("no GPU: the strict stand-in array serves")


def strict_module():
    import strict_array

    return strict_array


DEVICES = {"strict stand-in": strict_module, "cupy": cupy_module}


@pytest.fixture(params=DEVICES)
def device(request):
    """The array module is one that refuses implicit copies: the stand-in, and CuPy itself where there is a GPU."""
    from training import using

    module = DEVICES[request.param]()
    with using(module):
        yield module
