"""Claims about a script's first steps: ranks whose optimizers differ and a second optimizer are refused."""

import numpy as np
import pytest
from training import MLP

from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear
from minipar.parallel.parallelize import shard
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.zero_optimizer import ZeroOptimizer

STAGES = [0, 1, 2, 3]


def points(rank):
    """Two samples of this rank for an MLP."""
    draw = np.random.Generator(np.random.Philox(rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


def steps_with(comm, stage, lr, replicas=1):
    """Two steps, whose optimizer has the learning rate lr(rank)."""
    ddp = shard(MLP(), comm, stage, replicas=replicas)
    optimizer = AdamW(ddp.parameters(), lr=lr(comm.rank))
    for _ in range(2):
        ddp.loss(*points(comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "size", "replicas"), [(0, 2, 1), (1, 2, 1), (2, 3, 1), (3, 2, 1), (3, 4, 2)])
def test_another_learning_rate_on_each_rank_is_refused(stage, size, replicas):
    """Where ranks gather one another's updates, their parameters stay the same: so the rates are compared, too."""
    run_local(size, steps_with, stage, lambda rank: 0.1, replicas)
    says = "optimizers have parted: the learning rate of rank 1 is not that of rank 0; .*one lr, and one schedule"
    with pytest.raises(ValueError, match=says):
        run_local(size, steps_with, stage, lambda rank: 0.1 * (rank + 1), replicas)


def test_the_comparison_after_the_first_step_is_control_data():
    def rank(comm):
        steps_with(comm, 1, lambda rank: 0.1)
        once = comm.traffic.bytes("control")
        steps_with(comm, 1, lambda rank: 0.1)
        return once, comm.traffic.bytes("control"), comm.traffic.bytes() - comm.traffic.bytes("control")

    for once, twice, _ in run_local(2, rank):
        assert twice == 2 * once > 0


def test_a_step_on_one_rank_alone_is_refused():
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            ddp.loss(*points(comm.rank)).backward()
            if comm.rank == 0:
                optimizer.step()
            optimizer.zero_grad()

    says = "have parted: the number of steps of rank 1 is not that of rank 0; every rank must do the same"
    with pytest.raises(ValueError, match=says):
        run_local(2, rank)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_on_one_rank_alone_is_refused(stage):
    """At stage 3 on the ranks that hold the same shard: no other rank sees it."""

    def rank(comm):
        ddp = shard(MLP(), comm, stage, replicas=comm.size if stage else 1)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            ddp.loss(*points(comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if comm.rank == 1:
                ddp.parameters()[0].data *= 2

    with pytest.raises(ValueError, match="parameters have parted: first.weight.* of rank 1 is not that of rank 0"):
        run_local(2, rank)


def test_zero_optimizers_of_other_learning_rates_are_refused():
    def rank(comm):
        mesh = DeviceMesh(comm)
        model = PipelineModule([MLP()], mesh, num_microbatches=1)
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1 * (comm.rank + 1))
        for _ in range(2):
            model(*points(comm.rank))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ValueError, match="optimizers have parted: the learning rate of rank 1 is not that of rank 0"):
        run_local(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_of_the_same_parameters_are_refused(stage):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        first, second = AdamW(ddp.parameters()), SGD(ddp.parameters())
        ddp.loss(*points(comm.rank)).backward()
        first.step()
        with pytest.raises(
            RuntimeError, match="another optimizer has updated .*make one optimizer of wrapper.parameters"
        ):
            second.step()
        first.zero_grad()
        ddp.loss(*points(comm.rank)).backward()
        first.step()

    run_local(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_may_take_the_place_of_one_that_is_gone(stage):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        for _ in range(2):
            optimizer = SGD(ddp.parameters(), lr=0.1)
            ddp.loss(*points(comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            del optimizer

    run_local(2, rank)


def test_two_optimizers_may_share_the_parameters_out():
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizers = [SGD(ddp.parameters()[:1], lr=0.1), SGD(ddp.parameters()[1:], lr=0.2)]
        for _ in range(2):
            ddp.loss(*points(comm.rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
            ddp.zero_grad()

    run_local(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_with_one_backward_are_refused(stage):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        ddp.loss(*points(comm.rank)).backward()
        optimizer.step()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"step\(\) twice with the gradients of one backward\(\): call zero_grad"):
        run_local(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_added_after_the_wrapper_is_refused(stage):
    def rank(comm):
        model = MLP()
        ddp = shard(model, comm, stage)
        model.third = Linear(3, 3, name="third")
        ddp.loss(*points(comm.rank))

    with pytest.raises(UsageError, match="other parameters than when it was wrapped: build the whole model first"):
        run_local(2, rank)


@pytest.mark.parametrize("stage", [1, 2])
def test_values_that_the_strategy_would_not_see_are_refused(stage):
    def rank(comm):
        model = MLP()
        ddp = shard(model, comm, stage)
        model.parameters()[0].data = np.zeros_like(model.parameters()[0].data)
        ddp.loss(*points(comm.rank))

    with pytest.raises(UsageError, match=r"first.weight.data was replaced .* write p.data\[...\] = values"):
        run_local(2, rank)
