import numpy as np


def gradient_of_mean(comm, gradients, tokens):
    total = comm.all_reduce(gradients.sum(0))
    count = comm.all_reduce(np.array([float(tokens.sum())]))
    return total / count
