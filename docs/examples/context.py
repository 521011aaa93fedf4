"""Context parallelism: each rank holds a part of every sample's tokens. mpirun -n 4 python docs/examples/context.py"""

import sys

import numpy as np

import minipar as mp


def batches(steps=20):
    """Yield 8 samples per step, the same on every rank: inputs and targets, (8, 16) tokens each."""
    with open(np.__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int64)
    random = np.random.default_rng(0)
    for _ in range(steps):
        rows = text[random.integers(0, len(text) - 17, 8)[:, None] + np.arange(17)]
        yield rows[:, :-1], rows[:, 1:]


def main(world):
    model = mp.GPT(mp.GPTConfig(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    method = sys.argv[1] if len(sys.argv) > 1 else "ring"  # or all-gather, or ulysses
    context = mp.context_parallel(model, world, method)  # in place: attention and positions
    ddp = mp.DistributedDataParallel(model, world)  # a gradient covers this rank's tokens: sum them
    optimizer = mp.AdamW(ddp.parameters(), lr=1e-2)
    for x, y in batches():
        loss = ddp.loss(context.part(x), context.part(y))  # the mean over all tokens, the same on every rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
