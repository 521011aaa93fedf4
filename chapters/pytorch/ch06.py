"""Chapter 6 in PyTorch: parallelize_module with ColwiseParallel and RowwiseParallel, on the MLP of 6.2.

Run it with: python chapters/pytorch/ch06.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_processes import checksum, start

N, H = 32, 48  # tokens, hidden size


def main(rank):
    t = dist.get_world_size()
    random = np.random.default_rng(0)
    x, a, d = random.normal(size=(N, H)), random.normal(size=(H, 4 * H)), random.normal(size=(4 * H, H))
    bias_a, bias_d, dz = random.normal(size=4 * H), random.normal(size=H), random.normal(size=(N, H))
    up, down = torch.nn.Linear(H, 4 * H).double(), torch.nn.Linear(4 * H, H).double()
    for parameter, value in ((up.weight, a.T), (up.bias, bias_a), (down.weight, d.T), (down.bias, bias_d)):
        parameter.data = torch.tensor(value)  # torch's weights are (out, in), so columns are its rows
    mlp = torch.nn.Sequential(up, torch.nn.GELU(approximate="tanh"), down)
    parallelize_module(mlp, init_device_mesh("cpu", (t,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.tensor(x, requires_grad=True)
    with CommDebugMode() as counted:
        z = mlp(x)  # g: an all-reduce of the row layer's partial sums
        in_forward = counted.get_total_counts()
        z.backward(torch.tensor(dz))  # f: an all-reduce of the column layer's gradient of x
    in_all = counted.get_total_counts()
    sums = [checksum(tensor) for tensor in (z, x.grad, up.weight.grad.to_local().T)]
    if rank == 0:
        print("all-reduces in forward, in backward:", [in_forward, in_all - in_forward])
        print("bytes sent by each process in forward:", in_forward * 2 * z.nbytes * (t - 1) // t)  # of a ring
        print("shape of this process's part of A:", list(up.weight.to_local().T.shape))
        print("checksum of Z:", sums[0])
        print("checksum of dX:", sums[1])
        print("checksum of this process's dA:", sums[2])


if __name__ == "__main__":
    start(main)
