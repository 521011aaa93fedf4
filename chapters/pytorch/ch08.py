"""Chapter 8 in PyTorch: ScheduleInterleaved1F1B with two stages on each of two processes (8.1, 8.6).

Run it with: python chapters/pytorch/ch08.py
The same values go through ScheduleInterleavedZeroBubble, whose backwards are split into I and W (8.2).
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from two_processes import checksum, start

M, H, V = 4, 16, 2  # microbatches, hidden size, stages on each process


def loss_of(y, target):
    return (y**2).sum() / 2


def train(rank, kind, weights, batch):
    """Run one step. Return the actions of this process as PyTorch writes them, and the gradient of each stage."""
    p, stages, linears = dist.get_world_size(), [], []
    for s in range(rank, V * p, p):  # process r has the stages r and p + r
        linear = torch.nn.Linear(H, H, bias=False).double()
        linear.weight.data = torch.tensor(weights[s].T)
        linears.append(linear)
        module = torch.nn.Sequential(linear, torch.nn.Tanh())
        shape = torch.empty(8, H, dtype=torch.float64, requires_grad=True)
        device = torch.device("cpu")
        stages.append(PipelineStage(module, s, V * p, device, input_args=(shape,), output_args=(shape,)))
    schedule = kind(stages, n_microbatches=M, loss_fn=loss_of, scale_grads=False)
    inputs, target = ((batch,) if rank == 0 else ()), (batch if rank == p - 1 else None)
    schedule.step(*inputs, target=target)
    actions = [str(action) for action in schedule.pipeline_order[rank] if action is not None]  # None: it waits
    return " ".join(actions), [checksum(linear.weight.grad.T) for linear in linears]


def main(rank):
    weights = np.random.default_rng(5).normal(size=(V * dist.get_world_size(), H, H)) / 4
    batch = torch.tensor(np.random.default_rng(6).normal(size=(M * 8, H)))  # M microbatches of 8 samples
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, train(rank, kind, weights, batch))
        if rank == 0:
            for r, (actions, gradients) in enumerate(every):
                print(f"actions of process {r}, {kind.__name__}:", actions)
                print(f"checksums of the gradients of process {r}, {kind.__name__}:", gradients)


if __name__ == "__main__":
    start(main)
