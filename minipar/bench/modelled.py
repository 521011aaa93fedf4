"""A modelled cluster: the training code itself, its ranks threads of one process, on the clock `model`.

Nothing is simulated but time: every product is computed and every message carries its numbers, while the clock charges
what the cluster would take. So the planner can be held against the program on clusters that nobody here has.
"""

from __future__ import annotations

from minipar.bench.pipeline import random_tokens
from minipar.comm import Communicator, DeviceMesh, HostNetwork, ModelClock, Network, run_local
from minipar.plan.machine import Cluster
from minipar.train.config import TrainConfig
from minipar.train.trainer import Trainer


def modelled_step(config: TrainConfig, cluster: Cluster) -> float:
    """Seconds of one training step of a resolved configuration on a `plan.machine.model_clock_cluster`: from the common
    start until the last rank is done.
    """
    inside, between = cluster.inside, cluster.between
    network = HostNetwork(inside.alpha, inside.beta, Network(between.alpha, between.beta), cluster.per_host)

    def step(comm: Communicator) -> float:
        mesh = DeviceMesh(comm, tp=config.mesh.tp, pp=config.mesh.pp)
        trainer = Trainer(config, mesh, random_tokens(config))
        start = comm.clock.now()
        trainer.step(0)
        return comm.clock.now() - start

    return max(run_local(cluster.gpus, step, clock=lambda: ModelClock(cluster.gpu.peak), network=network))
