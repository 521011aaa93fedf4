def outer_round(comm, parameters, velocity, H, local_step):
    own = parameters.copy()
    for _ in range(H):
        local_step(own)
    moved = comm.all_reduce(own - parameters) / comm.size
    velocity *= 0.9
    velocity += moved
    parameters += 0.7 * (moved + 0.9 * velocity)
