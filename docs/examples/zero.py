"""ZeRO stage 2, or 1. Four ranks: mpirun -n 4 python docs/examples/zero.py"""

import numpy as np

import minipar as mp

CONFIG = mp.GPTConfig(vocab_size=256, n_positions=16, n_embd=32, n_layer=4, n_head=4)


def batches(steps=20):
    """Yield inputs and targets of 8 samples, (8, 16) tokens each; a sample counts upwards from a random byte."""
    for step in range(steps):
        start = np.random.default_rng(step).integers(256, size=(8, 1))
        tokens = (start + np.arange(17)) % 256
        yield tokens[:, :-1], tokens[:, 1:]


def main(world):
    model = mp.GPT(CONFIG, dtype="float64")
    zero = mp.shard(model, world, stage=2)  # 1 leaves the gradients whole
    optimizer = mp.AdamW(zero.parameters(), lr=1e-2)
    for x, y in batches():
        own = slice(world.rank, None, world.size)  # this rank's samples
        loss = zero.loss(x[own], y[own])  # the mean over the tokens of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.12f}")


if __name__ == "__main__":
    mp.launch(main)
