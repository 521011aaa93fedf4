import numpy as np


def scaled_step(comm, master, gradient, scale, good, lr):
    total = comm.reduce_scatter(gradient.astype(np.float32))
    overflow = comm.all_reduce(np.array([float(not np.isfinite(total).all())]), op="max")[0]
    if overflow:
        return master, scale / 2, 0
    master = master - lr * total / scale
    good += 1
    return (master, 2 * scale, 0) if good == 2000 else (master, scale, good)
