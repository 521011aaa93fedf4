import numpy as np


def step(inside, between, parameters, velocity, n, gradient_of, limit):
    whole = inside.all_gather(parameters, out=np.empty(n))
    gradient = inside.reduce_scatter(gradient_of(whole))
    between.all_reduce(gradient)
    gradient /= inside.size * between.size
    norm = np.sqrt(inside.all_reduce(np.array([(gradient**2).sum()]))[0])
    if norm > limit:
        gradient *= limit / norm
    velocity *= 0.9
    velocity += gradient
    parameters -= 0.1 * velocity
