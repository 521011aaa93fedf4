"""Chapter 4 in PyTorch: DistributedDataParallel, with another number of targets on each process (4.6).

Run it with: python chapters/pytorch/ch04.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from two_processes import checksum, start

TARGETS = [32, 16]  # that count, of 32 on each process


def gradient(rank, divisor):
    """Return the sum of losses, all gradients of (sum of losses / divisor), and the bytes that DDP all-reduced."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
    weights = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.data = torch.tensor(weights.normal(size=parameter.shape) / 4)
    sent = []

    def hook(group, bucket):  # DDP calls it when all gradients of a bucket are there
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    random = np.random.default_rng([4, rank])
    x, y = torch.tensor(random.normal(size=(32, 8))), torch.tensor(random.integers(0, 10, 32))
    y[TARGETS[rank] :] = -100  # cross_entropy ignores these
    loss_sum = cross_entropy(ddp(x), y, reduction="sum")
    (loss_sum / divisor).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return loss_sum.detach(), flat, sum(sent)


def main(rank):
    # DDP takes the mean of the processes' gradients, where minipar takes the sum of shares that were divided by the
    # global count already. So we divide by that count and multiply by the number of processes.
    loss, right, sent = gradient(rank, sum(TARGETS) / dist.get_world_size())
    _, of_means, _ = gradient(rank, TARGETS[rank])  # what `reduction="mean"` gives: a mean of means
    dist.all_reduce(loss)
    if rank == 0:
        print("loss:", loss.item() / sum(TARGETS))
        print("checksum of the gradient:", checksum(right))
        print("bytes of gradients all-reduced:", sent)
        print("a mean of means is off by:", ((of_means - right).abs().max() / right.abs().max()).item())


if __name__ == "__main__":
    start(main)
