"""Clip, schedule, save and resume a 3D model of one's own: mpirun -n 8 python docs/examples/resume.py (or 1 rank)"""

import tempfile

import numpy as np
from stages import Stage0, Stage1

import minipar as mp


def train(world, first, folder):
    mesh = mp.DeviceMesh(world, dp=2, tp=2, pp=2) if world.size == 8 else mp.DeviceMesh(world)
    model = mp.PipelineModule([Stage0, Stage1], mesh, num_microbatches=4)
    optimizer = mp.ZeroOptimizer(model.parameters(), mp.AdamW, mesh.dp)
    file = f"{folder}/optimizer-{world.rank}.npy"
    if first > 0:  # resume
        model.load_state_dict(np.load(f"{folder}/model-0.npz"))  # each rank takes its part, in any layout
        optimizer.load_state_dict(np.load(file, allow_pickle=True).item())  # this rank's own, of the same layout
    for step in range(first, first + 10):
        optimizer.lr = 1e-2 * min(1, (step + 1) / 5)  # the schedule
        x = np.random.default_rng(step).integers(0, 12, (16, 8))[mesh.dp.rank :: mesh.dp.size]
        loss = model(x, (x + 1) % 12)
        mp.clip_grad_norm(model.parameters(), 1.0, mesh.dp, mesh.tp, mesh.pp)  # by the norm over all axes
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")
    np.save(file, optimizer.state_dict())
    np.savez(f"{folder}/model-{world.rank}.npz", **model.state_dict())  # whole on rank 0, {} on the others
    world.barrier()  # nobody reads a file before it is written


def main(world):
    with tempfile.TemporaryDirectory() as own:
        for first in (0, 10):
            train(world, first, world.all_gather_bytes(own.encode())[0].decode())  # in rank 0's directory


if __name__ == "__main__":
    mp.launch(main)
