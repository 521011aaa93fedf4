"""Claims about scripts that call modules inside the model, with every wrapper: values and updates are one device's."""

import numpy as np
import pytest
from training import bits

import minipar.nn as nn
from minipar.comm import run_local
from minipar.nn import AdamW
from minipar.nn.module import Segment
from minipar.parallel.parallelize import shard

STAGES = [0, 1, 2, 3]


class Encoder(nn.Module):
    """Returns two values, and takes an option by its name."""

    def __init__(self):
        self.left = nn.Linear(3, 4, name="left")
        self.right = nn.Linear(4, 4, name="right")

    def forward(self, x, *, scale=1.0):
        left = self.left(x) * scale
        return left, self.right(left)  # whose backward reads its weight


class Model(nn.Module):
    def __init__(self):
        self.encoder = Encoder()
        self.head = nn.Linear(4, 1, name="head")

    def forward(self, x, *, scale=1.0):
        left, right = self.encoder(x, scale=scale)
        return self.head(left * right)

    def loss_sum(self, x, y):
        return ((self(x, scale=2.0) - y) ** 2.0).sum()


class InParts(Model):
    """The same in two parts, of which the first returns two values."""

    def __init__(self):
        super().__init__()
        encoder = Segment("encoder", self.encoder, self.encoder.parameters())
        self.segments = [encoder, Segment("head", self.product, self.head.parameters(), is_last=True)]

    def product(self, both):
        left, right = both
        return self.head(left * right)

    def forward(self, x, *, scale=2.0):
        for segment in self.segments:
            x = segment.run(x)
        return x


def batch(rank):
    random = np.random.Generator(np.random.Philox(rank))
    return random.standard_normal((2, 3)), random.standard_normal((2, 1))


def loss_of_modules(model, x, y):
    """The model's loss, for which a script calls the modules one by one."""
    left, right = model.encoder(x, scale=2.0)
    return ((model.head(left * right) - y) ** 2.0).sum()


def loss_of_model(model, x, y):
    return model.loss_sum(x, y)


def trained(comm, stage, loss_of, model=Model):
    """The bits after two steps, of a script that scales its loss itself."""
    ddp = shard(model(), comm, stage, "ordered")
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of(ddp.model, *batch(comm.rank)) * (1 / (2 * comm.size))
        with ddp.scaled_backward():
            loss.backward()
        ddp.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    return bits(ddp.state_dict())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_modules_called_one_by_one_train_the_same_bits(stage, size):
    want = run_local(size, trained, 0, loss_of_model)[0]
    assert run_local(size, trained, stage, loss_of_modules)[0] == want
    assert run_local(size, trained, stage, loss_of_model)[0] == want


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_called_alone_has_its_values(stage):
    x, _ = batch(0)
    left, right = Model().encoder(x, scale=3.0)

    def values(comm):
        ddp = shard(Model(), comm, stage)
        got = ddp.model.encoder(x, scale=3.0)
        return [item.data for item in got], ddp.model(x, scale=2.0).data

    for (own_left, own_right), whole in run_local(2, values):
        assert np.array_equal(own_left, left.data) and np.array_equal(own_right, right.data)
        assert np.array_equal(whole, Model()(x, scale=2.0).data)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_part_may_return_two_values(stage):
    want = run_local(2, trained, 0, loss_of_model, InParts)[0]
    assert run_local(2, trained, stage, loss_of_model, InParts)[0] == want
