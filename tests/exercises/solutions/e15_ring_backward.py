import numpy as np


def to_the_right(comm, array):
    arriving = np.empty_like(array)
    sending = comm.isend(array, (comm.rank + 1) % comm.size)
    comm.irecv(arriving, (comm.rank - 1) % comm.size).wait()
    sending.wait()
    return arriving


def ring_backward(comm, q, kv, terms):
    dq, dkv = np.zeros_like(q), np.zeros_like(kv)
    for step in range(comm.size):
        owner = (comm.rank - step) % comm.size
        of_q, of_kv = terms(q, kv, owner)
        dq += of_q
        dkv += of_kv
        if step < comm.size - 1:
            kv = to_the_right(comm, kv)
        if comm.size > 1:
            dkv = to_the_right(comm, dkv)
    return dq, dkv
