from math import sqrt

import numpy as np


def gradient_norm(mesh, gradients):
    total = np.zeros(1)
    for gradient in gradients:
        first = gradient.divided or mesh.tp.rank == 0
        if first and (not gradient.tied or mesh.pp.rank == 0):
            total += (gradient.array**2).sum()
    mesh.tp.all_reduce(total)
    mesh.pp.all_reduce(total)
    return sqrt(total[0])
