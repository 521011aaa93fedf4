"""Arrays of another module: every operation takes them through host memory, and returns arrays of that module."""

import numpy as np
import pytest

from minipar.backend import from_host, to_host, xp
from minipar.comm import run_local

DTYPE = np.float32  # not the dtype of an array that is made without one


def values(r, n):
    return (np.arange(n) * 3 + 10 * r).astype(DTYPE)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_of_device_arrays_are_those_of_numpys(device, ranks, async_op):
    def program(comm):
        def both(operation, n, out=None, **options):
            """Call it on an array of NumPy and on one of the device, in place and with an array for the result."""
            host = getattr(comm, operation)(values(comm.rank, n), **options)
            given = from_host(values(comm.rank, n))
            outs = [None] if out is None else [None, xp.zeros(host.shape, dtype=DTYPE)]
            for own in outs:
                arrays = [given] if own is None else [given, own]
                result = getattr(comm, operation)(*arrays, async_op=async_op, **options)
                result = result.wait() if async_op else result
                assert isinstance(result, device.ndarray) and result.dtype == DTYPE
                assert to_host(result).tolist() == host.tolist()
                assert own is None or result is own
                assert result is given or to_host(given).tolist() == values(comm.rank, n).tolist()

        both("all_reduce", 3)
        both("all_reduce", 2, op="max")
        both("reduce_scatter", 3, out=True)
        both("all_gather", 2, out=True)
        both("all_to_all", 2 * comm.size)
        both("broadcast", 2, root=comm.size - 1)
        comm.isend(from_host(values(comm.rank, 4)), (comm.rank + 1) % comm.size)
        message = comm.irecv(xp.zeros(4, dtype=DTYPE), (comm.rank - 1) % comm.size).wait()
        assert isinstance(message, device.ndarray)
        assert to_host(message).tolist() == values((comm.rank - 1) % comm.size, 4).tolist()

    run_local(ranks, program)
