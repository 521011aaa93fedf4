"""Claims about the smallest model, of one parameter: each strategy trains it as one device does."""

import numpy as np
import pytest

from minipar.comm import run_local, serial
from minipar.nn import SGD, Linear, Module
from minipar.parallel.ddp import DistributedDataParallel, NaiveDataParallel
from minipar.parallel.parallelize import shard
from minipar.parallel.placement import placement_of
from minipar.parallel.zero_optimizer import ZeroOptimizer

SIZES = [(3, 2), (1, 1)]  # of (1, 1) the first rank has the one element, and the others have nothing


class One(Module):
    """A matrix alone."""

    def __init__(self, n_in, n_out):
        self.only = Linear(n_in, n_out, name="only", bias=False, std=0.5, dtype="float64")

    def forward(self, x):
        return self.only(x)

    def loss_sum(self, x, y):
        return ((self.only(x) - y) ** 2.0).sum()


def samples(step, rank, n_in, n_out):
    draw = np.random.Generator(np.random.Philox(10 * step + rank)).standard_normal
    return draw((2, n_in)), draw((2, n_out))


def trained(comm, stage, n_in, n_out, ranks):
    """Return the norms and the state of two clipped steps over the samples of so many ranks."""
    ddp = shard(One(n_in, n_out), comm, stage, "ordered")
    optimizer = SGD(ddp.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        shares = [samples(step, rank, n_in, n_out) for rank in range(comm.rank, ranks, comm.size)]
        x, y = (np.concatenate(arrays) for arrays in zip(*shares, strict=True))
        ddp.loss(x, y).backward()
        norms.append(ddp.clip_grad_norm(0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = ddp.state_dict()
    return norms, state


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_the_one_parameter(stage, sizes):
    norms, state = trained(serial(), 0, *sizes, 3)
    outcomes = run_local(3, trained, stage, *sizes, 3)
    for found, _ in outcomes:
        np.testing.assert_allclose(found, norms, rtol=1e-13)
    assert list(outcomes[0][1]) == ["only.weight"]
    np.testing.assert_allclose(outcomes[0][1]["only.weight"], state["only.weight"], rtol=1e-13)


@pytest.mark.parametrize("sizes", SIZES)
def test_zero_optimizer_updates_the_one_parameter(sizes):
    def rank(comm):
        model = One(*sizes)
        optimizer = ZeroOptimizer(model.parameters(), SGD, comm, "ordered", lr=0.1)
        for step in range(2):
            shares = [samples(step, rank, *sizes) for rank in range(comm.rank, 3, comm.size)]
            x, y = (np.concatenate(arrays) for arrays in zip(*shares, strict=True))
            (model.loss_sum(x, y) / 6).backward()
            optimizer.step()
            optimizer.zero_grad()
        placement = placement_of(model.only.weight)
        return model.only.weight.data, (placement.name, placement.unit, placement.units)

    (expected, _), *_ = run_local(1, rank)
    for weight, placed in run_local(3, rank):
        np.testing.assert_allclose(weight, expected, rtol=1e-13)
        assert placed == ("0", 0, 1)


@pytest.mark.parametrize("kind", [NaiveDataParallel, DistributedDataParallel])
def test_plain_data_parallelism_has_the_mean_of_all_targets(kind):
    """One rank has the only target here, whose mean is itself."""

    def rank(comm):
        x, y = samples(0, 0, 3, 1)
        count = 1 if comm.rank == 0 else 0
        model = kind(One(3, 1), comm)
        loss = model.loss(x[:count], y[:count])
        loss.backward()
        return loss.item(), model.model.only.weight.grad.copy()

    x, y = samples(0, 0, 3, 1)
    model = One(3, 1)
    expected = model.loss_sum(x[:1], y[:1])
    expected.backward()
    for loss, gradient in run_local(2, rank):
        assert loss == expected.item()
        np.testing.assert_allclose(gradient, model.only.weight.grad, rtol=1e-14)
