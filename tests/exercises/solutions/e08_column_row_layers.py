import numpy as np


def forward(comm, x, A, b, D, e):
    inner = x @ A + b  # (N, 4h/t)
    z = np.maximum(inner, 0)
    y = comm.all_reduce(z @ D) + e  # (N, h)
    return y, (comm, x, A, D, z)


def backward(comm, dy, saved):
    comm, x, A, D, z = saved
    dinner = (dy @ D.T) * (z > 0)
    dx = comm.all_reduce(dinner @ A.T)
    return {"x": dx, "A": x.T @ dinner, "b": dinner.sum(0), "D": z.T @ dy, "e": dy.sum(0)}
