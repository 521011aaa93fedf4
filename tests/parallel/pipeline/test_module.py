"""Claims about a pipeline of the user's stages: with replicas of unequal batches it trains as one device does."""

from functools import partial

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.tensor.user_layers import ColumnParallelLinear, RowParallelLinear
from minipar.parallel.zero_optimizer import ZeroOptimizer

DRAW = np.random.Generator(np.random.Philox(15)).standard_normal
X, Y = DRAW((8, 4)), DRAW((8, 2))
SHARES = slice(0, 3), slice(3, 8)  # of two replicas


class First(Module):
    def __init__(self, mesh=None):
        self.linear = Linear(4, 6, name="first", std=0.5, dtype="float64")

    def forward(self, x):
        return self.linear(x).tanh()


class Last(Module):
    def __init__(self, mesh=None):
        self.linear = Linear(6, 2, name="last", std=0.5, dtype="float64")

    def loss_sum(self, x, y):
        return ((self.linear(x) - y) ** 2.0).sum()


def one_device():
    """The loss and the weights after a step over all samples."""
    first, last = First(), Last()
    optimizer = SGD(first.parameters() + last.parameters(), lr=0.1)
    loss = last.loss_sum(first(X), Y) * (1 / Y.size)
    loss.backward()
    optimizer.step()
    return loss.item(), [first.linear.weight.data, last.linear.weight.data]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_replicas_of_unequal_batches_train_as_one_device(schedule):
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, pp=2)
        model = PipelineModule([First, Last], mesh, num_microbatches=3, schedule=schedule)
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        share = SHARES[mesh.dp.rank]
        loss = model(X[share], Y[share]).item()
        optimizer.step()
        return loss, mesh.pp.rank, model.parameters()[0].data

    loss, weights = one_device()
    for own_loss, stage, weight in run_local(4, rank):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(weight, weights[stage], rtol=1e-12, atol=1e-14)


class ColumnFirst(Module):
    """A last stage whose input goes into a split layer at once."""

    def __init__(self, mesh):
        self.up = ColumnParallelLinear(6, 4, mesh.tp, name="up", std=0.5, dtype="float64")
        self.down = RowParallelLinear(4, 2, mesh.tp, name="down", std=0.5, dtype="float64")

    def loss_sum(self, x, y):
        return ((self.down(self.up(x)) - y) ** 2.0).sum()


def test_placements_say_what_every_rank_of_tp_has():
    """The split layers note their own; all else is the same on each rank."""

    class Mixed(ColumnFirst):
        def __init__(self, mesh):
            super().__init__(mesh)
            self.scale = Linear(2, 2, name="scale")

    def rank(comm):
        mesh = DeviceMesh(comm, tp=2)
        model = PipelineModule([Mixed], mesh, 1)
        return {name: type(p.placement.tp).__name__ for name, p in model.named_parameters()}

    kinds = run_local(2, rank)[0]
    assert {kinds[name] for name in kinds if "scale" in name} == {"Replicate"}
    assert "Shard" in kinds.values()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_may_start_with_a_split_layer_under_zb_h1(tp):
    """The gradient of the stage's input is on its way from other ranks, but it is no weight's: it is not put off."""

    def rank(schedule, comm):
        model = PipelineModule([First, ColumnFirst], DeviceMesh(comm, pp=2, tp=tp), 4, schedule=schedule)
        model(X, Y)
        return [p.grad for p in model.parameters()]

    whole = run_local(2 * tp, partial(rank, "1f1b"))
    halves = run_local(2 * tp, partial(rank, "zb-h1"))
    for own, other in zip(whole, halves, strict=True):
        for gradient, same in zip(own, other, strict=True):
            np.testing.assert_array_equal(gradient, same)


def test_an_optimizer_that_sums_no_replicas_is_refused():
    def rank(comm):
        model = PipelineModule([First, Last], DeviceMesh(comm, dp=2, pp=2), num_microbatches=2)
        with pytest.raises(ValueError, match="write ZeroOptimizer"):
            AdamW(model.parameters())

    run_local(4, rank)
