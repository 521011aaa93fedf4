"""Expert parallelism: each rank holds some experts of a Mixtral. mpirun -n 4 python docs/examples/expert.py"""

import numpy as np

import minipar as mp


def batches(rank, ranks, steps=20):
    """Yield this rank's share of 8 samples per step: inputs and targets, (8 / ranks, 16) tokens each."""
    with open(np.__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int64)
    random = np.random.default_rng(0)
    for _ in range(steps):
        rows = text[random.integers(0, len(text) - 17, 8)[:, None] + np.arange(17)]
        own = np.array_split(rows, ranks)[rank]
        yield own[:, :-1], own[:, 1:]


def main(world):
    mesh = mp.DeviceMesh(world, dp=world.size, ep=min(2, world.size))  # pairs of ranks share the experts
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6}
    model = mp.Mixtral(mp.MixtralConfig(vocab_size=256, hidden_size=32, intermediate_size=48, **sizes))
    experts = mp.expert_parallel(model, mesh.ep, mesh.edp)  # in place: keeps this rank's experts
    groups = experts.groups(mesh.dp_cp)  # experts are summed over mesh.edp, all else over all ranks
    ddp = mp.DistributedDataParallel(model, mesh.dp_cp, groups=groups)
    optimizer = mp.AdamW(ddp.parameters(), lr=1e-2)
    for x, y in batches(world.rank, world.size):
        loss = ddp.loss(x, y)  # the mean over the tokens of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
