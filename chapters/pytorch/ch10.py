"""Chapter 10 in PyTorch: is the planner right about the activations of a layer under tensor parallelism?

Run it with: python chapters/pytorch/ch10.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_processes import start

T, H, HEADS = 64, 48, 6  # one sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.q, self.k, self.v = nn.LayerNorm(H), nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
        self.c_proj, self.ln_2 = nn.Linear(H, H), nn.LayerNorm(H)
        self.c_fc, self.gelu, self.c_out = nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)

    def forward(self, x):  # (T, H)
        x_1 = self.ln_1(x)
        q, k, v = (f(x_1).view(T, -1, H // HEADS).transpose(0, 1) for f in (self.q, self.k, self.v))  # own heads
        p = (q @ k.mT / 8 + torch.full((T, T), -torch.inf).triu(1)).softmax(dim=-1)
        x = x + self.c_proj((p @ v).transpose(0, 1).reshape(T, -1))
        return x + self.c_out(self.gelu(self.c_fc(self.ln_2(x))))


def main(rank):
    block, kept = Block(), {}  # kept: elements of each storage, which views share
    columns = dict.fromkeys(("q", "k", "v", "c_fc"), ColwiseParallel())
    rows = dict.fromkeys(("c_proj", "c_out"), RowwiseParallel())
    parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), columns | rows)

    def keep(tensor):  # autograd calls it for each tensor that it saves for backward
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes() // local.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(torch.ones(T, H, requires_grad=True))
    for parameter in block.parameters():  # weights are saved, too, and are no activations
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        kept.pop(local.untyped_storage().data_ptr(), None)
    if rank == 0:
        print("elements that a layer keeps on each process:", sum(kept.values()))
        assert y.shape == (T, H)


if __name__ == "__main__":
    start(main)
