import numpy as np


def gradients(comm, shards, x, target):
    h = x.shape[1]

    def gather(layer):
        return comm.all_gather(shards[layer], out=np.empty(h * h)).reshape(h, h)

    inputs = [x]
    for layer in range(len(shards)):
        weight = gather(layer)
        inputs.append(np.tanh(inputs[-1] @ weight))
        del weight
    g, result = inputs[-1] - target, []
    for layer in reversed(range(len(shards))):
        u = g * (1 - inputs[layer + 1] ** 2)
        result.append(comm.reduce_scatter((inputs[layer].T @ u).reshape(-1)))
        weight = gather(layer)
        g = u @ weight.T
        del weight
    return result[::-1]
