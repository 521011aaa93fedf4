"""Claims about the settings of a process: BLAS's threads, malloc, and the device whose arrays are computed."""

import ctypes
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from minipar import backend
from minipar.backend import is_host, one_blas_thread, prepare_process, use, use_device, wait_for_device, xp
from minipar.errors import UsageError


@pytest.fixture
def limits(monkeypatch):
    """What BLAS is limited to."""
    calls = []
    pools = SimpleNamespace(limit=lambda **options: calls.append(options) or options)
    monkeypatch.setattr(backend, "_thread_pools", lambda: pools)
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    return calls


def test_blas_has_one_thread(limits):
    assert one_blas_thread() == {"limits": 1, "user_api": "blas"}
    assert limits == [{"limits": 1, "user_api": "blas"}]


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_a_system_without_mallopt_is_left_as_it_is(error, limits, monkeypatch):
    def library(name):
        raise error

    monkeypatch.setattr(ctypes, "CDLL", library)
    prepare_process()
    assert len(limits) == 1


# ---- the device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    """A module like CuPy on a host with two GPUs, which notes what is asked of it."""
    asked = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    stream = SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda number: SimpleNamespace(use=lambda: asked.append(number)),
        get_current_stream=lambda: stream,
    )
    module = SimpleNamespace(cuda=cuda, ndarray=list, add="cupy's", asked=asked)
    monkeypatch.setitem(sys.modules, "cupy", module)
    before = xp.module
    yield module
    use(before)


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_share_out_the_gpus_of_their_host(rank, number, cupy):
    use_device("cuda", rank)
    assert xp.module is cupy and cupy.asked == [number]


def test_the_functions_are_those_of_the_device(cupy):
    assert xp.add is np.add
    use_device("cuda", 0)
    assert xp.add == "cupy's"
    wait_for_device()
    assert cupy.asked == [0, "synchronize"]
    use_device("cpu", 0)
    assert xp.add is np.add
    wait_for_device()
    assert cupy.asked == [0, "synchronize"]


def test_a_device_that_is_missing_is_named(monkeypatch):
    with pytest.raises(UsageError, match="^--device tpu: expected cpu or cuda$"):
        use_device("tpu", 0)

    def missing(name):
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    line = r"^--device cuda needs CuPy \(pip install 'minipar\[gpu\]'\) and a GPU: No module named cupy$"
    with pytest.raises(UsageError, match=line):
        use_device("cuda", 0)
    assert xp.module is np


def test_arrays_of_the_host_are_not_copied(cupy):
    array = np.ones(3)
    assert backend.to_host(array) is array and backend.from_host(array) is array
    assert is_host(array) and not is_host([1.0])
    copy = np.zeros(1)
    assert backend.to_host(SimpleNamespace(get=lambda: copy)) is copy
    cupy.asarray = lambda values: ["a copy", values]
    use(cupy)
    assert backend.from_host(array) == ["a copy", array] and backend.to_host(array) is array
