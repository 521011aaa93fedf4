import numpy as np


def own_heads(a, G, t, r):
    of_q = range(r * a // t, (r + 1) * a // t)
    return of_q, range(of_q[0] * G // a, of_q[-1] * G // a + 1)


def gradients(comm, G, dq, dk, dv):
    copies = max(1, comm.size // G)
    first = comm.rank - comm.rank % copies
    sharers = comm.new_group(list(range(first, first + copies)), "copies")
    if copies > 1:
        dk, dv = np.split(sharers.all_reduce(np.concatenate([dk, dv])), 2)
    return dq, dk, dv


def norm(comm, G, dq, dk, dv):
    copies = max(1, comm.size // G)
    squares = (dq**2).sum() + ((dk**2).sum() + (dv**2).sum()) / copies
    return float(np.sqrt(comm.all_reduce(np.array([squares]))[0]))
