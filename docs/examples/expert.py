"""Expert parallelism: each rank holds some experts of a Mixtral. mpirun -n 4 python docs/examples/expert.py"""

import numpy as np

import minipar as mp

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 6}
CONFIG = mp.MixtralConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **SIZES)


def batches(steps=20):
    """Yield inputs and targets of 8 samples, (8, 16) tokens each; a sample counts upwards from a random byte."""
    for step in range(steps):
        start = np.random.default_rng(step).integers(256, size=(8, 1))
        tokens = (start + np.arange(17)) % 256
        yield tokens[:, :-1], tokens[:, 1:]


def main(world):
    mesh = mp.DeviceMesh(world, dp=world.size, ep=min(2, world.size))  # pairs of ranks share the experts
    model = mp.Mixtral(CONFIG, dtype="float64")
    experts = mp.expert_parallel(model, mesh.ep, mesh.edp)  # in place: keeps this rank's experts
    groups = experts.groups(mesh.dp_cp)  # experts are summed over mesh.edp, all else over all ranks
    ddp = mp.DistributedDataParallel(model, mesh.dp_cp, groups=groups)
    optimizer = mp.AdamW(ddp.parameters(), lr=1e-2)
    for x, y in batches():
        own = slice(world.rank, None, world.size)  # this rank's samples
        loss = ddp.loss(x[own], y[own])  # the mean over the tokens of all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.12f}")


if __name__ == "__main__":
    mp.launch(main)
