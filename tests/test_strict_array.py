"""The strict stand-in refuses what CuPy refuses, and otherwise computes what NumPy computes."""

import copy
import operator
import sys

import numpy as np
import pytest
import strict_array as sa
from training import using

from minipar import backend
from minipar.errors import UsageError

HOST = np.arange(6.0).reshape(2, 3)


@pytest.fixture
def device():
    return sa.asarray(HOST)


def same(result, expected):
    assert isinstance(result, sa.ndarray)
    assert result.dtype == np.asarray(expected).dtype and result.shape == np.shape(expected)
    np.testing.assert_array_equal(result.get(), expected)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert", [np.asarray, np.array, np.add.reduce, np.sum, np.exp, np.concatenate, memoryview, bytes]
)
def test_numpy_cannot_take_the_array(device, convert):
    with pytest.raises((TypeError, AttributeError)):
        convert(device)


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("host", [HOST, np.array(2.0), [1.0, 2.0, 3.0]], ids=["2-d", "0-d", "list"])
def test_operators_refuse_host_arrays_on_either_side(device, name, host):
    function = getattr(operator, name)
    with pytest.raises(TypeError):
        function(device, host)
    with pytest.raises(TypeError):
        function(host, device)


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow"])
def test_in_place_operators_refuse_host_arrays(device, name):
    host = HOST.copy()
    with pytest.raises(TypeError):
        getattr(operator, name)(device, host)
    with pytest.raises(TypeError):
        getattr(operator, name)(host, device)


def test_functions_indices_and_values_refuse_host_arrays(device):
    host = HOST.copy()
    refused = [
        lambda: sa.add(device, host),
        lambda: sa.add(device, device, out=host),
        lambda: sa.exp([1.0, 2.0]),
        lambda: sa.sum(host),
        lambda: sa.concatenate([device, host]),
        lambda: sa.where(device > 1, host, 0.0),
        lambda: sa.einsum("ij,ij->", device, host),
        lambda: device[np.array([0, 1])],
        lambda: device[:, np.array([0, 1])],
        lambda: device.take(np.array([0])),
        lambda: device.dot(host.T),
        lambda: operator.setitem(device, slice(None), host),
        lambda: operator.setitem(device, 0, [1.0, 2.0, 3.0]),
        lambda: operator.setitem(host, slice(None), device),
        lambda: sa.copyto(device, host),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(TypeError):
            call()
            pytest.fail(f"number {number} was not refused")
    np.testing.assert_array_equal(device.get(), HOST)


def test_names_are_those_of_the_real_cupy(device):
    assert not hasattr(sa, "no_such_function")
    for name in ("asmatrix", "memmap", "float96"):  # NumPy (or neither) has them, CuPy does not
        assert not hasattr(sa, name)
    assert not hasattr(sa.linalg, "matrix_transpose_of_nothing")
    assert not hasattr(device, "ctypes") and not hasattr(device, "itemset") and not hasattr(device, "data")
    assert not hasattr(sa, "cuda")  # backend.wait_for_device asks


def test_keywords_are_those_of_the_real_cupy(device):
    with pytest.raises(TypeError, match="where"):
        sa.add(device, device, where=device > 1)
    with pytest.raises(TypeError, match="initial"):
        sa.max(device, initial=0.0)
    with pytest.raises(TypeError, match="initial"):
        device.max(initial=0.0)
    with pytest.raises(TypeError, match="where"):
        sa.sum(device, where=device > 1)


# ---- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BINARY if name != "matmul"])
@pytest.mark.parametrize("scalar", [2, 2.5, np.float64(2.5), np.float32(2.5)])
def test_operators_with_scalars_and_arrays(device, name, scalar):
    function = getattr(operator, name)
    with np.errstate(all="ignore"):
        same(function(device, scalar), function(HOST, scalar))
        same(function(scalar, device), function(scalar, HOST))
        same(function(device, device[0]), function(HOST, HOST[0]))


def test_float32_stays_float32():
    x = sa.zeros(3, dtype=sa.float32)
    assert (x * 2.0 + 1).dtype == np.float32 and x.mean().dtype == np.float32


def test_functions_methods_and_views(device):
    same(sa.matmul(device, device.T), HOST @ HOST.T)
    same(device @ device.T, HOST @ HOST.T)
    same(device.reshape(3, -1), HOST.reshape(3, -1))
    same(device.transpose(1, 0), HOST.T)
    same(device.astype(sa.float32), HOST.astype(np.float32))
    same(device.sum(axis=0, keepdims=True), HOST.sum(axis=0, keepdims=True))
    same(sa.where(device > 2, device, 0.0), np.where(HOST > 2, HOST, 0.0))
    same(sa.concatenate([device, device]), np.concatenate([HOST, HOST]))
    same(sa.split(device, 3, axis=1)[1], np.split(HOST, 3, axis=1)[1])
    same(sa.linalg.norm(device), np.linalg.norm(HOST))
    same(-device, -HOST)
    same(device[None, :, 1:], HOST[None, :, 1:])
    same(device[device > 2], HOST[HOST > 2])
    same(sa.add.reduce(device, axis=1), np.add.reduce(HOST, axis=1))
    assert device.shape == (2, 3) and device.ndim == 2 and device.size == 6 and device.flags.c_contiguous
    assert sa.float64 is np.float64 and sa.newaxis is None and isinstance(device, sa.ndarray)


def test_reductions_and_elements_are_arrays_of_no_dimensions(device):
    for value in (device.sum(), sa.max(device), device[1, 2]):
        assert isinstance(value, sa.ndarray) and value.shape == ()
    assert float(device[1, 2]) == 5.0 and int(device[1, 2]) == 5 and bool(device[1, 2]) and device.sum().item() == 15.0
    assert f"{device[1, 2]:.1f}" == "5.0" and len(device) == 2 and [row.shape for row in device] == [(3,), (3,)]
    with pytest.raises(ValueError, match="ambiguous"):
        bool(device)


def test_in_place_changes_the_array_and_its_views(device):
    row, before = device[0], device
    device += 1
    device *= device
    assert device is before
    same(row, (HOST[0] + 1) ** 2)
    row[...] = 0.0
    row[1] = device[1, 1]
    same(device[0], [0.0, 25.0, 0.0])
    out = sa.empty_like(device)
    assert sa.add(device, 1, out=out) is out and sa.asarray(out) is out
    same(out, device.get() + 1)
    sa.add.at(out, (sa.asarray(np.array([0, 0])), 0), 1.0)
    assert float(out[0, 0]) == 3.0


def test_the_doors_copy(device):
    host = HOST.copy()
    array = sa.asarray(host)
    host[:] = -1
    same(array, HOST)
    array.get()[:] = -1
    same(array, HOST)
    array.set(host)
    same(array, host)
    np.testing.assert_array_equal(sa.asnumpy(array), host)
    same(copy.deepcopy(array), host)


def test_backend_runs_on_it():
    with using(sa):
        x = backend.from_host(HOST)
        assert isinstance(x, sa.ndarray) and not backend.is_host(x)
        np.testing.assert_array_equal(backend.to_host(backend.xp.multiply(x, 2.0)), HOST * 2)
        backend.wait_for_device()
    assert backend.xp.module is np


def test_a_device_of_another_name_is_refused():
    with pytest.raises(UsageError, match="--device gpu: expected cpu or cuda"):
        backend.use_device("gpu", 0)


def test_cuda_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(UsageError, match="--device cuda needs CuPy .* and a GPU"):
        backend.use_device("cuda", 0)
    assert backend.xp.module is np
