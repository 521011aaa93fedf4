import numpy as np

from minipar.comm import chunk_bounds


def reduce_scatter(comm, x):
    bounds = chunk_bounds(x.size, comm.size)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    total = x[slice(*bounds[left])].copy()
    for step in range(1, comm.size):
        start, stop = bounds[(left - step) % comm.size]
        arriving = np.empty(stop - start, x.dtype)
        sending = comm.isend(total, right)
        comm.irecv(arriving, left).wait()
        sending.wait()
        total = arriving + x[start:stop]
    return total
