"""Arrays of another module: every operation takes them through host memory, and returns arrays of that module."""

import numpy as np
import pytest

from minipar.backend import from_host, to_host, xp
from minipar.comm import run_local
from minipar.errors import CommunicationError

DTYPE = np.float32  # not the dtype of an array that is made without one


def on_device(values):
    return from_host(np.array(values, DTYPE))


def values_of(device, array, own=None):
    """Return the values of a device array after checking that it has DTYPE, and is `own` if that is given."""
    assert isinstance(array, device.ndarray) and array.dtype == DTYPE
    assert own is None or array is own
    return to_host(array).tolist()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_collective_takes_device_arrays(device, ranks, async_op):
    def done(result):
        return result.wait() if async_op else result

    def program(comm):
        r, p = comm.rank, comm.size
        x = on_device([[1 + r, 2, 3]])
        found = [values_of(device, done(comm.all_reduce(x, async_op=async_op)), x)]
        x = on_device([4.0 + r, 5.0 - r])
        found.append(values_of(device, done(comm.all_reduce(x, op="max", async_op=async_op)), x))
        x = on_device([1 + r, 2, 3])
        found.append(values_of(device, done(comm.reduce_scatter(x, async_op=async_op))))
        chunks = {1: [3], 2: [2, 1]}  # elements of each rank, of three
        out = on_device([0] * chunks[p][r])
        found.append(values_of(device, done(comm.reduce_scatter(x, out, async_op=async_op)), out))
        found.append(values_of(device, x))
        found.append(values_of(device, done(comm.all_gather(on_device([r, r]), async_op=async_op))))
        out = on_device(np.zeros((p, 2)))
        found.append(values_of(device, done(comm.all_gather(on_device([r, 7]), out, async_op=async_op)), out))
        found.append(values_of(device, done(comm.all_to_all(on_device(10 * r + np.arange(p)), async_op=async_op))))
        x = on_device([5 + r, 6])
        found.append(values_of(device, done(comm.broadcast(x, root=p - 1, async_op=async_op)), x))
        return found

    found = run_local(ranks, program)
    if ranks == 1:
        expected = [[[1, 2, 3]], [4, 5], [1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 0], [[0, 7]], [0], [5, 6]]
        assert found == [expected]
        return
    both = [[[3, 4, 6]], [5, 5]]
    gathered = [[0, 0, 1, 1], [[0, 7], [1, 7]]]
    assert found[0] == [*both, [3, 4], [3, 4], [1, 2, 3], *gathered, [0, 10], [6, 6]]
    assert found[1] == [*both, [6], [6], [2, 2, 3], *gathered, [1, 11], [6, 6]]


def test_a_message_takes_a_device_array_to_another(device):
    def program(comm):
        x = on_device([[1, 2], [3, 4]])
        if comm.rank == 0:
            assert comm.isend(x, 1).wait() is None
            return values_of(device, x)
        out = on_device(np.zeros((2, 2)))
        return values_of(device, comm.irecv(out, 0).wait(), out)

    assert run_local(2, program) == [[[1, 2], [3, 4]]] * 2


@pytest.mark.parametrize(
    ("size", "dtype", "given"), [(4, DTYPE, "4 elements of float32"), (3, np.float64, "3 elements of float64")]
)
def test_a_result_of_another_size_or_dtype_is_refused(device, size, dtype, given):
    def program(comm):
        out = xp.zeros(size, dtype=dtype)
        comm.reduce_scatter(on_device([1, 2, 3]), out)

    with pytest.raises(CommunicationError, match=f"reduce_scatter: out has {given}, expected 3 of float32"):
        run_local(1, program)
