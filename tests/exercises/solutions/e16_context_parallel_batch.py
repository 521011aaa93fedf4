import numpy as np


def own_part(tokens, r, c):
    length = len(tokens) - 1
    if length % (2 * c):
        raise ValueError(f"{length} tokens are not {2 * c} equal chunks")
    positions = np.arange(length).reshape(2 * c, -1)[[r, 2 * c - 1 - r]].reshape(-1)
    return tokens[positions], tokens[positions + 1], positions


def mean_over_ranks(comm, loss_sum, gradient, count):
    sums = comm.all_reduce(np.concatenate([[loss_sum, count], gradient]))
    return sums[0] / sums[1], sums[2:] / sums[1]
