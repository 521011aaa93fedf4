"""Claims about a pipeline of the user's stages: with replicas of unequal batches it trains as one device does."""

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.parallel.pipeline.module import PipelineModule
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


def test_an_optimizer_that_sums_no_replicas_is_refused():
    def rank(comm):
        model = PipelineModule([First, Last], DeviceMesh(comm, dp=2, pp=2), num_microbatches=2)
        with pytest.raises(ValueError, match="write ZeroOptimizer"):
            AdamW(model.parameters())

    run_local(4, rank)
