"""Claims about scripts that are unusual and right: with every wrapper they train what one device trains."""

import numpy as np
import pytest
from training import MLP, bits, clip, whole_state

import minipar as mp
from minipar.comm import run_local
from minipar.nn import SGD, AdamW, Linear, Module, Parameter
from minipar.nn.module import Segment
from minipar.parallel.wrap import shard

STAGES = [0, 1, 2, 3]


def points(rank, step=0):
    """Two samples of this rank for an MLP, and for the models of this file."""
    draw = np.random.Generator(np.random.Philox(100 * step + rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


# ---- modules that a script calls by themselves -----------------------------------------------------------------------


class Encoder(Module):
    """Returns two values, and takes an option by its name."""

    def __init__(self):
        self.left = Linear(3, 4, name="left", dtype="float64")
        self.right = Linear(4, 4, name="right", dtype="float64")

    def forward(self, x, *, scale=1.0):
        left = self.left(x) * scale
        return left, self.right(left)  # whose backward reads its weight


class Product(Module):
    """A model with an encoder inside."""

    def __init__(self):
        self.encoder = Encoder()
        self.head = Linear(4, 1, name="head", dtype="float64")

    def product(self, both):
        left, right = both
        return self.head(left * right)

    def forward(self, x, *, scale=2.0):
        return self.product(self.encoder(x, scale=scale))

    def loss_sum(self, x, y):
        return ((self(x, scale=2.0) - y) ** 2.0).sum()


class InParts(Product):
    """The same in two parts."""

    def __init__(self):
        super().__init__()
        encoder = Segment("encoder", self.encode, self.encoder.parameters())
        self.segments = [encoder, Segment("head", self.head, self.head.parameters(), is_last=True)]

    def encode(self, x):
        left, right = self.encoder(x, scale=2.0)
        return left * right

    def forward(self, x, *, scale=2.0):
        for segment in self.segments:
            x = segment.run(x)
        return x


def loss_of_modules(model, x, y):
    """The model's loss, for which a script calls the modules one by one."""
    return ((model.model.product(model.model.encoder(x, scale=2.0)) - y) ** 2.0).sum()


def loss_of_model(model, x, y):
    return model.loss_sum(x, y)


def scaled_script(comm, stage, loss_of, model=Product):
    """The bits after two steps of a script that scales its loss itself."""
    ddp = shard(model(), comm, stage, "ordered")
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of(ddp, *points(comm.rank)) * (1 / (2 * comm.size))
        with ddp.scaled_backward():
            loss.backward()
        ddp.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    return bits(whole_state(ddp))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_modules_called_one_by_one_train_the_same_bits(stage, size):
    want = run_local(size, scaled_script, 0, loss_of_model)[0]
    if stage < 3:  # there a wrapper gathers for its own calls alone
        assert run_local(size, scaled_script, stage, loss_of_modules)[0] == want
    assert run_local(size, scaled_script, stage, loss_of_model)[0] == want
    assert run_local(size, scaled_script, stage, loss_of_model, InParts)[0] == want


# ---- steps -----------------------------------------------------------------------------------------------------------


def trained(size, stage, step, model=MLP):
    """The bits after three steps, each of which is `step(ddp, optimizer, x, y)`."""

    def rank(comm):
        ddp = shard(model(), comm, stage, "ordered")
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        for i in range(3):
            step(ddp, optimizer, *points(comm.rank, i))
        return bits(whole_state(ddp))

    return run_local(size, rank)[0]


def plain(ddp, optimizer, x, y):
    ddp.loss(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluates(ddp, optimizer, x, y):
    """Between the step and zero_grad, and on the same batch everywhere."""
    ddp.loss(x, y).backward()
    optimizer.step()
    with mp.no_grad():
        ddp.loss(np.ones((2, 3)), np.ones((2, 1)))
    optimizer.zero_grad()


def sets_none(ddp, optimizer, x, y):
    ddp.loss(x, y).backward()
    optimizer.step()
    for p in (*ddp.parameters(), *ddp.model.parameters()):
        p.grad = None


class Fails(MLP):
    """A model that fails in the middle of its forward if its input holds a NaN."""

    def forward(self, x):
        hidden = mp.gelu(self.first(x))
        if np.isnan(x).any():
            raise FloatingPointError("a NaN")
        return self.second(hidden)


def fails_first(ddp, optimizer, x, y):
    """In a unit whose parameters have been gathered."""
    for call in (lambda: ddp.loss(x * np.nan, y), lambda: ddp(x * np.nan)):
        with pytest.raises(FloatingPointError):
            call()
    plain(ddp, optimizer, x, y)


def fails_in_backward(ddp, optimizer, x, y):
    """After the head's gradients have been sent."""
    remove = ddp.model.encoder.left.weight.register_post_accumulate_grad_hook(lambda leaf: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp.loss(2 * x, y).backward()
    remove()
    ddp.synchronize()
    optimizer.zero_grad()
    plain(ddp, optimizer, x, y)


class Judged(MLP):
    """A model whose loss makes another model, which is not trained."""

    def loss_sum(self, x, y):
        with mp.no_grad():
            MLP()(x)
        return super().loss_sum(x, y)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_script_does_beside_a_step_changes_no_bit(stage):
    want = trained(2, stage, plain)
    assert trained(2, stage, evaluates) == want
    assert trained(2, stage, sets_none) == want
    assert trained(2, stage, fails_first, Fails) == want
    assert trained(2, stage, plain, Judged) == want
    assert trained(2, stage, fails_in_backward, InParts) == trained(2, stage, plain, InParts)


def test_values_that_replace_a_parameters_are_trained_at_stage_0():
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.0)
        plain(ddp, optimizer, *points(comm.rank))
        last = ddp.model.parameters()[-1]
        last.data = np.full(last.shape, 7.0)
        plain(ddp, optimizer, *points(comm.rank))
        return whole_state(ddp)

    assert run_local(2, rank)[0]["second.bias"] == [7.0]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_inside_no_sync_ends_with_the_outer_one(stage, nested):
    """Nothing is sent until the outermost block has ended, also if a block inside it ends. One that fails ends, too."""

    def rank(comm):
        ddp = shard(MLP(), comm, stage, "ordered")
        operations = "all_reduce" if stage == 0 else "reduce_scatter"
        with pytest.raises(ZeroDivisionError), ddp.no_sync(), ddp.no_sync():
            1 / 0  # noqa: B018
        with ddp.no_sync():
            if nested:
                with ddp.no_sync():
                    pass
            loss = ddp.loss(*points(comm.rank))
            before = comm.traffic.bytes(operations)
            loss.backward()
            assert comm.traffic.bytes(operations) == before
        ddp.loss(*points(comm.rank, 1)).backward()
        return clip(ddp, None)

    norms = run_local(2, rank)
    assert norms[0] == norms[1]


class Three(Module):
    """A model of three elements."""

    def __init__(self):
        self.weight = Parameter(np.array([0.5, -1.0, 2.0]))

    def loss_sum(self, x, y):
        return ((x * self.weight - y) ** 2.0).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_elements_clip_by_the_same_norm(stage):
    def rank(comm):
        ddp = shard(Three(), comm, stage)
        ddp.loss(np.ones((1, 3)), np.zeros((1, 3))).backward()
        norm = clip(ddp, 0.5)
        AdamW(ddp.parameters()).step()
        return norm

    gradient = 2 * np.array([0.5, -1.0, 2.0]) / 3
    assert run_local(5, rank) == [pytest.approx(np.linalg.norm(gradient), rel=1e-14)] * 5


# ---- an optimizer's state --------------------------------------------------------------------------------------------


def resumable(comm, stage, steps, weights=None, states=None):
    """Train some steps, from a state if one is given; return the whole state and the optimizer's."""
    model = MLP()
    if weights is not None:
        model.load_state_dict(weights)
    ddp = shard(model, comm, stage)
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    if states is not None:
        optimizer.load_state_dict(states[comm.rank])
    for step in steps:
        plain(ddp, optimizer, *points(comm.rank, step))
    return whole_state(ddp), optimizer.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_continues_from_its_own_optimizer_state(stage):
    halves = run_local(2, resumable, stage, range(3))
    states = [state for _, state in halves]
    resumed = run_local(2, resumable, stage, range(3, 6), halves[0][0], states)
    assert bits(resumed[0][0]) == bits(run_local(2, resumable, stage, range(6))[0][0])
    swapped = states[::-1]
    if stage == 0:  # all ranks hold the same
        run_local(2, resumable, stage, range(1), None, swapped)
    else:
        with pytest.raises(ValueError, match="optimizer"):
            run_local(2, resumable, stage, range(1), None, swapped)


def test_shards_of_one_size_are_told_apart():
    """Two ranks' parts of one parameter have the same shapes; what they hold is compared, too."""

    class One(Module):
        def __init__(self):
            self.weight = Parameter(np.ones((4, 1)))

    def rank(comm, states):
        optimizer = AdamW(shard(One(), comm, 1).parameters(), lr=0.1)
        if states is not None:
            optimizer.load_state_dict(states[comm.rank])
        return optimizer.state_dict()

    states = run_local(2, rank, None)
    run_local(2, rank, states)
    with pytest.raises(ValueError, match=r"weight\[.:.\]"):
        run_local(2, rank, states[::-1])
