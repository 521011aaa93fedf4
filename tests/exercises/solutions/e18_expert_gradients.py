import numpy as np


def mean_gradients(mesh, shared, experts, tokens):
    count = mesh.dp.all_reduce(np.array([float(tokens)]))[0]
    shared = mesh.dp.all_reduce(shared) / count
    experts = mesh.edp.all_reduce(experts) / count
    squares = mesh.ep.all_reduce(np.array([(experts**2).sum()]))[0]
    return shared, experts, float(np.sqrt((shared**2).sum() + squares))
