"""3D parallelism with ZeRO stage 1: mpirun -n 8 python docs/examples/three_d.py"""

from functools import partial

import numpy as np
from halves import First, Last

import minipar as mp

CONFIG = mp.GPTConfig(vocab_size=256, n_positions=16, n_embd=32, n_layer=4, n_head=4)


def batches(steps=20):
    """Yield inputs and targets of 8 samples, (8, 16) tokens each; a sample counts upwards from a random byte."""
    for step in range(steps):
        start = np.random.default_rng(step).integers(256, size=(8, 1))
        tokens = (start + np.arange(17)) % 256
        yield tokens[:, :-1], tokens[:, 1:]


def main(world):
    mesh = mp.DeviceMesh(world, dp=2, tp=2, pp=2)
    gpt = mp.GPT(CONFIG, dtype="float64")
    mp.tensor_parallel(gpt, mesh.tp)  # in place: parameters become this rank's columns and rows
    stages = [partial(First, gpt), partial(Last, gpt)]
    model = mp.PipelineModule(stages, mesh, num_microbatches=4, schedule="1f1b")
    tied = model.stage0.wte.weight if mesh.pp.rank == 0 else model.stage1.head.weight
    optimizer = mp.ZeroOptimizer(model.parameters(), mp.AdamW, mesh.dp, lr=1e-2)  # step() sums gradients over dp
    for x, y in batches():
        own = slice(mesh.dp.rank, None, mesh.dp.size)  # this replica's samples
        loss = model(x[own], y[own])  # forward and backward of all microbatches
        mesh.pp.all_reduce(tied.grad)  # both stages have this matrix: its gradient is the sum of the two
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.12f}")


if __name__ == "__main__":
    mp.launch(main)
