"""Claims about a step of a pipeline of the user's stages: it trains as one device does, and sends what it says."""

import numpy as np
import pytest

from minipar.autograd import no_grad
from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD, Linear, Module
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.placement import placement_of
from minipar.parallel.tensor.user_layers import ColumnParallelLinear, RowParallelLinear
from minipar.parallel.zero_optimizer import ZeroOptimizer

RANDOM = np.random.Generator(np.random.Philox(77))
X = RANDOM.standard_normal((4, 3))
Y = RANDOM.standard_normal((4, 3))


class Stage(Module):
    """One layer."""

    def __init__(self, i=0, dtype="float64"):
        self.linear = Linear(3, 3, name=f"layer{i}", std=0.5, dtype=dtype)

    def forward(self, x):
        return self.linear(x).tanh()

    def loss_sum(self, x, y):
        return ((self.linear(x) - y) ** 2.0).sum()


def stages(count, dtype="float64"):
    return [lambda mesh, i=i: Stage(i, dtype) for i in range(count)]


def one_device(count):
    """Return the loss and the gradients of the weights of the same stages on one device."""
    layers = [Stage(i) for i in range(count)]
    x = X
    for layer in layers[:-1]:
        x = layer(x)
    loss = layers[-1].loss_sum(x, Y) * (1 / Y.size)
    loss.backward()
    return loss.item(), {f"stage{i}.linear.weight": layers[i].linear.weight.grad for i in range(count)}


# ---- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), "float64"), ((2, 5, 3), "float32"), ((2, 1, 4, 3), "float64")])
def test_a_step_sends_what_its_docstring_says(dtype, shape):
    """For a microbatch it sends an activation behind 64 bytes, and its gradient; then 2 values over dp, 1 over pp."""

    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, pp=2)
        model = PipelineModule(stages(2, dtype), mesh, num_microbatches=2)
        x = np.full(shape, 1.0 + comm.rank % 2, dtype)
        model(x, x)
        comm.traffic.reset()
        model(x, x)
        assert {p.grad.dtype for p in model.parameters()} == {np.dtype(dtype)}
        return {key: count for key, count in comm.traffic.counts.items() if count != [0, 0]}

    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    counts = run_local(4, rank)
    first = {("send", "pp"): [4, size + 2 * 64], ("all_reduce", "pp"): [2, 8]}
    last = {("send", "pp"): [2, size], ("all_reduce", "pp"): [2, 8], ("all_reduce", "dp"): [4, 16]}
    assert counts == [first, first, last, last]


# ---- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "count", "pp"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 6, 2),
        ("zb-h1", 3, 3),
        ("zbv", 4, 2),
        ("zbv", 8, 2),
        ("interleaved-1f1b", 2, 2),
        ("interleaved-1f1b", 6, 2),
    ],
)
def test_consecutive_stages_share_a_rank_and_train_as_one_device(schedule, count, pp):
    def rank(comm):
        model = PipelineModule(stages(count), DeviceMesh(comm, pp=pp), num_microbatches=4, schedule=schedule)
        loss = model(X, Y).item()
        places = [(p.placement.pp, p.placement.unit, p.placement.units) for p in model.parameters()]
        assert {(place, units) for place, _, units in places} == {(comm.rank, count)}
        weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
        for name, p in weights.items():
            assert name == f"stage{placement_of(p).unit}.linear.weight"
        return loss, {name: p.grad for name, p in weights.items()}

    loss, gradients = one_device(count)
    found = {}
    for own_loss, own in run_local(pp, rank):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        assert not set(found) & set(own)
        found |= own
    assert sorted(found) == sorted(gradients)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-12, atol=1e-14)


# ---- the loss --------------------------------------------------------------------------------------------------------


class Chosen(Stage):
    """A last stage whose targets are the indices of columns, or are ignored."""

    def loss_sum(self, x, y):
        weights = np.zeros((len(y), 3))
        for i, target in enumerate(y):
            if target >= 0:
                weights[i, target] = 1.0
        return (self.linear(x) * weights).sum()


@pytest.mark.parametrize(("targets", "divisor"), [([1, -100], 1), ([2, 1], 2), ([-100, -100], 1)])
def test_the_mean_is_over_the_targets_that_count(targets, divisor):
    x = RANDOM.standard_normal((2, 3))

    def rank(comm):
        model = PipelineModule([lambda mesh: Chosen()], DeviceMesh(comm), num_microbatches=2)
        loss = model(x, np.array(targets)).item()
        whole = Chosen()
        expected = whole.loss_sum(x, np.array(targets)) * (1 / divisor)
        expected.backward()
        found = model.parameters()[0].grad
        np.testing.assert_allclose(found, whole.parameters()[0].grad, rtol=1e-12, atol=1e-15)
        return loss, expected.item()

    ((loss, expected),) = run_local(1, rank)
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert any(target >= 0 for target in targets) == (loss != 0)


# ---- replicas and split layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_replicas_of_unequal_batches_train_as_one_device(schedule):
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, pp=2)
        model = PipelineModule(stages(2), mesh, num_microbatches=1, schedule=schedule)
        before = model.parameters()[0].data.copy()
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        share = (slice(0, 1), slice(1, 4))[mesh.dp.rank]
        loss = model(X[share], Y[share]).item()
        optimizer.step()
        return loss, f"stage{mesh.pp.rank}.linear.weight", (before - model.parameters()[0].data) / 0.1

    loss, gradients = one_device(2)
    for own_loss, name, moved in run_local(4, rank):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(moved, gradients[name], rtol=1e-10, atol=1e-13)


class ColumnFirst(Module):
    """A last stage whose input goes into a split layer at once."""

    def __init__(self, mesh):
        self.up = ColumnParallelLinear(3, 4, mesh.tp, name="up", std=0.5, dtype="float64")
        self.down = RowParallelLinear(4, 3, mesh.tp, name="down", std=0.5, dtype="float64")

    def loss_sum(self, x, y):
        return ((self.down(self.up(x)) - y) ** 2.0).sum()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_may_start_with_a_split_layer_under_zb_h1(tp):
    """The gradient of the stage's input is on its way from other ranks, but it is no weight's: it is not put off."""

    def rank(comm, schedule):
        model = PipelineModule([lambda mesh: Stage(), ColumnFirst], DeviceMesh(comm, pp=2, tp=tp), 4, schedule=schedule)
        model(X, Y)
        return [p.grad.tobytes() for p in model.parameters()]

    assert run_local(2 * tp, rank, "zb-h1") == run_local(2 * tp, rank, "1f1b")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
def test_under_no_grad_it_evaluates(schedule):
    """The loss is that of training; nothing has a gradient, no gradient is sent, and a step may follow."""

    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, pp=2)
        model = PipelineModule(stages(4 if schedule in ("interleaved-1f1b", "zbv") else 2), mesh, 2, schedule)
        own = slice(2 * mesh.dp.rank, 2 * mesh.dp.rank + 2)
        with no_grad():
            evaluated = model(X[own], Y[own]).item()
        sent = comm.traffic.messages("send")
        assert all(p.grad is None for p in model.parameters())
        comm.traffic.reset()
        trained = model(X[own], Y[own]).item()
        return evaluated, trained, sent, comm.traffic.messages("send")

    results = run_local(4, rank)
    assert len({loss for evaluated, trained, *_ in results for loss in (evaluated, trained)}) == 1
    assert 0 < sum(sent for *_, sent, _ in results) < sum(sent for *_, sent in results)


def test_a_batch_of_a_wider_dtype_trains_on_any_number_of_ranks():
    """Layers are float32 by default, and NumPy's arrays float64: the gradient is sent in the activations' dtype."""

    def rank(comm):
        mesh = DeviceMesh(comm, pp=comm.size)
        model = PipelineModule(stages(2, "float32"), mesh, 2)
        loss = model(X, Y).item()
        return loss, {placement_of(p).name: p.grad for p in model.parameters()}

    (loss, expected), split = run_local(1, rank)[0], run_local(2, rank)
    for own_loss, gradients in split:
        assert own_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)
