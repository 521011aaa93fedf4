"""ZeRO: only the wrapper differs from ddp.py. mpirun -n 4 python docs/examples/zero.py 3 (the stage) 2 (replicas)"""

import sys

import numpy as np

import minipar as mp


def batches(rank, size, steps=20):
    """Yield this rank's share of 8 samples per step: inputs and targets, (samples, 16) tokens each."""
    with open(np.__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int64)
    random = np.random.default_rng(0)  # the same on every rank
    for _ in range(steps):
        starts = random.integers(0, len(text) - 17, 8)[rank::size]
        rows = text[starts[:, None] + np.arange(17)]
        yield rows[:, :-1], rows[:, 1:]


def main(world):
    model = mp.GPT(mp.GPTConfig(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    stage = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    replicas = int(sys.argv[2]) if len(sys.argv) > 2 else 1  # 2: hybrid sharding, within each half of the ranks
    ranks = mp.HybridComm(world, replicas) if replicas > 1 else world
    zero = mp.shard(model, ranks, stage)
    optimizer = mp.AdamW(zero.parameters(), lr=1e-2)
    for x, y in batches(world.rank, world.size):
        loss = zero.loss(x, y)  # the mean over the tokens of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
