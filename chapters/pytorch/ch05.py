"""Chapter 5 in PyTorch: fully_shard, ZeRO's stage 3, on the layers of 5.4.

Run it with: python chapters/pytorch/ch05.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from two_processes import checksum, start

LAYERS, WIDTH, STEPS = 4, 9, 3


def main(rank):
    model = torch.nn.Sequential()
    for i in range(LAYERS):
        linear = torch.nn.Linear(WIDTH, WIDTH, bias=False).double()
        matrix = np.random.default_rng([1, i]).normal(0, 0.3, (WIDTH, WIDTH))
        linear.weight.data = torch.tensor(matrix).T.contiguous()  # torch's weight is (out, in)
        model.append(torch.nn.Sequential(linear, torch.nn.Tanh()))
        fully_shard(model[i])  # each layer is a unit: gathered before it computes, freed after it
        model[i].set_gradient_divide_factor(1)  # a sum over the processes, as in 5.3, and not their mean
    fully_shard(model)  # the root, which has no parameters of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # holds this process's shards
    for step in range(STEPS):
        samples = torch.tensor(np.random.default_rng([2, step, rank]).normal(size=(5, WIDTH)))
        loss = (model(samples) ** 2).sum() / 2
        loss.backward()  # ends with a reduce-scatter of each layer's gradient
        optimizer.step()
        optimizer.zero_grad()
    shards = [parameter.to_local() for parameter in model.parameters()]
    state = [value for each in optimizer.state.values() for value in (each["exp_avg"], each["exp_avg_sq"])]
    sizes = [sum(shard.nbytes for shard in shards), sum(moment.to_local().nbytes for moment in state)]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, sizes)
    weights = torch.cat([parameter.full_tensor().T.flatten() for parameter in model.parameters()])  # collective
    if rank == 0:
        # minipar cuts a layer's flat array, (41, 40) of 81 values; torch cuts each matrix by rows, (5, 4) of 9.
        print("bytes of parameters, process by process:", [parameters for parameters, _ in every])
        print("bytes of optimizer state, process by process:", [moments for _, moments in every])
        print("checksum of the weights:", checksum(weights))


if __name__ == "__main__":
    start(main)
