"""Chapter 3 in PyTorch: a ring all-reduce from sends and receives, beside torch's own collectives.

Run it with: python chapters/pytorch/ch03.py
"""

import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import P2POp
from two_processes import start

N = 10_000


def contribution(rank):
    """Return the values that a process brings, as in 3.2."""
    return torch.tensor(np.random.default_rng([2, rank]).standard_normal(N) * 1000, dtype=torch.float32)


def ring(x):
    """Set x to the sum of all processes' x. Return the bytes that this process has sent: torch counts none."""
    p, r = dist.get_world_size(), dist.get_rank()
    sent = 0
    chunks = x.chunk(p)  # views of x
    for step in range(2 * (p - 1)):
        leaving, arriving = chunks[(r - 1 - step) % p], chunks[(r - 2 - step) % p]
        received = torch.empty_like(arriving)
        pair = [P2POp(dist.isend, leaving, (r + 1) % p), P2POp(dist.irecv, received, (r - 1) % p)]
        for work in dist.batch_isend_irecv(pair):  # 3.1's `exchange`
            work.wait()
        if step < p - 1:  # reduce-scatter
            arriving += received
        else:  # all-gather
            arriving.copy_(received)
        sent += leaving.nbytes
    return sent


def main(rank):
    by_ring, at_once, in_two = (contribution(rank) for _ in range(3))
    sent = ring(by_ring)
    dist.all_reduce(at_once)  # in place; it returns nothing, where minipar returns the array
    chunk = torch.empty(N // dist.get_world_size())  # chunks must be equally long, where minipar's need not
    dist.reduce_scatter_single(chunk, in_two)  # before torch 2.13: reduce_scatter_tensor
    dist.all_gather_single(in_two, chunk)  # before torch 2.13: all_gather_into_tensor
    if rank == 0:
        print("bytes sent by each process:", sent)
        for name, total in (("ring", by_ring), ("all_reduce", at_once), ("reduce_scatter, all_gather", in_two)):
            print(f"bits of the sum, {name}:", zlib.crc32(total.numpy()))


if __name__ == "__main__":
    start(main)
