"""A pipeline of stages of one's own: mpirun -n 2 python docs/examples/pipeline.py (1 or 2 ranks)"""

import numpy as np

import minipar as mp


class First(mp.Module):
    def __init__(self, mesh):
        self.embedding, self.up = mp.Embedding(10, 32, name="embedding"), mp.Linear(32, 64, name="up")

    def forward(self, tokens):
        return mp.gelu(self.up(self.embedding(tokens)))  # (B, T, 64)


class Last(mp.Module):
    def __init__(self, mesh):
        self.norm, self.head = mp.LayerNorm(64), mp.Linear(64, 10, name="head")

    def loss_sum(self, x, y):
        return mp.cross_entropy_sum(self.head(self.norm(x)), y)


def main(world):
    mesh = mp.DeviceMesh(world, pp=world.size)
    model = mp.PipelineModule([First, Last], mesh, num_microbatches=4, schedule="1f1b")
    optimizer = mp.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):  # the task: the token after t is t + 1 modulo 10
        x = np.random.default_rng(step).integers(0, 10, (8, 16))
        loss = model(x, (x + 1) % 10)  # forward and backward of all microbatches
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
