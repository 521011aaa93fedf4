import numpy as np


def all_reduce(comm, x):
    total, arriving = x.copy(), np.empty_like(x)
    power = 1 << (comm.size.bit_length() - 1)
    if comm.rank >= power:
        comm.isend(x, comm.rank - power).wait()
        comm.irecv(total, comm.rank - power).wait()
        return total
    extra = comm.rank + power < comm.size
    if extra:
        comm.irecv(arriving, comm.rank + power).wait()
        total += arriving
    distance = 1
    while distance < power:
        sending = comm.isend(total, comm.rank ^ distance)
        comm.irecv(arriving, comm.rank ^ distance).wait()
        sending.wait()
        total = total + arriving
        distance *= 2
    if extra:
        comm.isend(total, comm.rank + power).wait()
    return total
