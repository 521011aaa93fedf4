"""Chapter 7 in PyTorch: Schedule1F1B on two stages, the layers and microbatches of 7.5.

Run it with: python chapters/pytorch/ch07.py
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from two_processes import checksum, start

M, H = 4, 16  # microbatches, hidden size


def loss_of(y, target):
    return (y**2).sum() / 2


def main(rank):
    p = dist.get_world_size()
    weights = np.random.default_rng(5).normal(size=(p, H, H)) / 4
    batch = torch.tensor(np.random.default_rng(6).normal(size=(M * 8, H)))  # M microbatches of 8 samples
    linear = torch.nn.Linear(H, H, bias=False).double()
    linear.weight.data = torch.tensor(weights[rank].T)
    module, done = torch.nn.Sequential(linear, torch.nn.Tanh()), []

    def note(module, inputs, output):
        done.append("F")
        output.register_hook(lambda gradient: done.append("B"))

    module.register_forward_hook(note)
    # The shape of what a stage gets and returns. Without it torch runs the stage once more, to find out.
    shape = torch.empty(8, H, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(module, rank, p, torch.device("cpu"), input_args=(shape,), output_args=(shape,))
    # By default it divides the gradients by the number of microbatches; 7.5 adds them up.
    schedule = Schedule1F1B(stage, n_microbatches=M, loss_fn=loss_of, scale_grads=False)
    inputs, target = ((batch,) if rank == 0 else ()), (batch if rank == p - 1 else None)
    schedule.step(*inputs, target=target)  # the last stage calls loss_fn(its output, target)
    names = [f"{rank}{kind}{done[:i].count(kind)}" for i, kind in enumerate(done)]
    alive = [done[:i].count("F") - done[:i].count("B") for i in range(len(done) + 1)]
    every = [None] * p
    dist.all_gather_object(every, (" ".join(names), max(alive), checksum(linear.weight.grad.T)))
    if rank == 0:
        for r, (actions, most, gradient) in enumerate(every):
            print(f"actions of process {r}:", actions)
            print(f"activations alive at most on process {r}:", most)
            print(f"checksum of the gradient of process {r}:", gradient)


if __name__ == "__main__":
    start(main)
