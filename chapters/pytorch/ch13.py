"""Chapter 13 in PyTorch: a lost update and its master (13.2), a sum in bfloat16 (13.5), autocast and GradScaler (13.4).

Run it with: python chapters/pytorch/ch13.py
"""

import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from two_processes import start


def main(rank):
    weight, master = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    for _ in range(24):
        weight += 2**-9  # less than half of the distance to the next bfloat16: lost
        master += 2**-9

    terms = torch.tensor(np.random.default_rng([13, rank]).normal(size=1001)).float().bfloat16()
    dist.all_reduce(terms)  # each addition is rounded to bfloat16

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    taken = []
    for step in range(3):
        with torch.autocast(
            "cpu", torch.float16
        ):  # products in float16; the weights stay in float32, and are the masters
            loss = ddp(torch.full((4, 8), 0.1)).float().square().mean() / 16  # in float32: 2^16 is beyond float16
        if step == 1 and rank == 1:
            loss = loss * torch.inf  # an overflow on one process only
        scaler.scale(loss).backward()
        # The scaler looks at this process's gradients only. DDP has summed them, so all see the infinity; for sharded
        # gradients torch has ShardedGradScaler. minipar looks at the norm, which all ranks compute together.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken.append(int(optimizer.state[ddp.module.weight]["step"]))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (taken, scaler.get_scale()))
    if rank == 0:
        print("after 24 steps of 2^-9, in bfloat16 and with a master:", [weight.item(), master.bfloat16().item()])
        print("bits of the sum in bfloat16:", zlib.crc32(terms.view(torch.uint8).numpy()))
        print("updates after each step, process by process:", [each for each, _ in every])
        print("loss scale in the end, process by process:", [scale for _, scale in every])


if __name__ == "__main__":
    start(main)
