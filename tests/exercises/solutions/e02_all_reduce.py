import numpy as np

from minipar.comm import chunk_bounds


def all_gather(comm, chunk, n):
    bounds, result = chunk_bounds(n, comm.size), np.empty(n, chunk.dtype)
    result[slice(*bounds[comm.rank])] = chunk
    for step in range(comm.size - 1):
        own, arriving = (bounds[(comm.rank - step - k) % comm.size] for k in (0, 1))
        sending = comm.isend(result[slice(*own)], (comm.rank + 1) % comm.size)
        comm.irecv(result[slice(*arriving)], (comm.rank - 1) % comm.size).wait()
        sending.wait()
    return result


def all_reduce(comm, x):
    chunk = comm.reduce_scatter(x.reshape(-1), algorithm="ring")
    return all_gather(comm, chunk, x.size).reshape(x.shape)
