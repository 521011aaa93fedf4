"""Chapter 9 in PyTorch: init_device_mesh with two axes, and three layouts with one loss curve (9.1, 9.3).

Run it with: python chapters/pytorch/ch09.py
It starts four processes: two axes that are larger than 1 need them.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_processes import start

STEPS, BATCH, H = 3, 8, 16
LAYOUTS = [(4, 1), (1, 4), (2, 2)]  # sizes of dp and tp


def losses(dp, tp):
    """Train an MLP over a mesh. Return the loss of each step, the rows of tp and the rows of dp."""
    # The last axis is the fastest, as in minipar: the ranks of one tp row are neighbours.
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    weights, batches = np.random.default_rng(8), np.random.default_rng(80)
    up, down = torch.nn.Linear(H, 4 * H), torch.nn.Linear(4 * H, H)
    mlp = torch.nn.Sequential(up, torch.nn.Tanh(), down, torch.nn.Tanh()).double()
    for parameter in mlp.parameters():
        parameter.data = torch.tensor(weights.normal(size=parameter.shape) / 4)
    parallelize_module(mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(mlp, mesh=mesh["dp"])  # each tp part once more, over the ranks that hold the same part
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        x, y = torch.tensor(batches.normal(size=(2, BATCH, H))).chunk(dp, dim=1)[mesh.get_local_rank("dp")]
        loss = ((mlp(x) - y) ** 2).mean()  # fully_shard takes the mean over dp: right, as all ranks have equally many
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dp
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        found.append(mean.item())
    return found, mesh.mesh.tolist(), mesh.mesh.T.tolist()


def main(rank):
    for dp, tp in LAYOUTS:
        found, tp_rows, dp_rows = losses(dp, tp)
        if rank == 0:
            print(f"losses with dp {dp}, tp {tp}:", found)
            print(f"rows of tp, rows of dp with dp {dp}, tp {tp}:", [tp_rows, dp_rows])


if __name__ == "__main__":
    start(main, processes=4)
