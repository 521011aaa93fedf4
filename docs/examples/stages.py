"""3D parallelism with stages of one's own: mpirun -n 16 python docs/examples/stages.py (or 1 rank)"""

import numpy as np

import minipar as mp


class Stage0(mp.Module):
    def __init__(self, mesh):
        self.embedding = mp.VocabParallelEmbedding(12, 32, mesh.tp, name="embedding")
        self.up = mp.ColumnParallelLinear(32, 128, mesh.tp, name="up")
        self.down = mp.RowParallelLinear(128, 32, mesh.tp, name="down")

    def forward(self, tokens):
        return self.down(mp.gelu(self.up(self.embedding(tokens))))  # (B, T, 128/tp) inside, then (B, T, 32)


class Stage1(mp.Module):
    def __init__(self, mesh):
        self.norm, self.head = mp.LayerNorm(32), mp.ColumnParallelLinear(32, 12, mesh.tp, name="head", bias=False)

    def loss_sum(self, x, y):
        return mp.vocab_parallel_cross_entropy_sum(self.head(self.norm(x)), y, self.head.group)


def main(world):
    mesh = mp.DeviceMesh(world, dp=2, tp=4, pp=2) if world.size == 16 else mp.DeviceMesh(world)
    model = mp.PipelineModule([Stage0, Stage1], mesh, num_microbatches=8, schedule="1f1b")
    optimizer = mp.ZeroOptimizer(model.parameters(), mp.AdamW, mesh.dp, lr=1e-2)
    for step in range(20):  # the task: the token after t is t + 1 modulo 12
        x = np.random.default_rng(step).integers(0, 12, (16, 8))[mesh.dp.rank :: mesh.dp.size]
        loss = model(x, (x + 1) % 12)  # forward and backward of all microbatches, across all stages
        optimizer.step()  # sums gradients over dp, updates this rank's shard, gathers parameters
        optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    mp.launch(main)
