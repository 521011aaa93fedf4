"""Tensor parallelism of a GPT or a Llama. mpirun -n 4 python docs/examples/tensor.py [llama] (1, 2 or 4 ranks)"""

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
    if sys.argv[1:] == ["llama"]:
        model = mp.Llama(
            mp.LlamaConfig(256, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
        )
    else:
        model = mp.GPT(mp.GPTConfig(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    mp.tensor_parallel(model, world)  # in place: parameters become this rank's parts
    optimizer = mp.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        loss = model.loss(x, y)  # every rank computes the same loss, each with its columns and rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
