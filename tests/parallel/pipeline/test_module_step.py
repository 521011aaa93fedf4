"""Claims about a step of the user's stages: what it sends, which stages it takes, and what a stage sees."""

import numpy as np
import pytest

from minipar.autograd import packed, position_ids
from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD, Linear, Module
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.placement import placement_of
from minipar.parallel.zero_optimizer import ZeroOptimizer

RANDOM = np.random.Generator(np.random.Philox(77))
X = RANDOM.standard_normal((4, 3))
Y = RANDOM.standard_normal((4, 3))


class Stage(Module):
    """One layer, which notes the position ids that it sees."""

    def __init__(self, i=0, dtype="float64"):
        self.linear = Linear(3, 3, name=f"layer{i}", std=0.5, dtype=dtype)
        self.seen = []

    def forward(self, x):
        self.seen.append(position_ids.get())
        return self.linear(x).tanh()

    def loss_sum(self, x, y):
        self.seen.append(position_ids.get())
        return ((self.linear(x) - y) ** 2.0).sum()


def stages(count, dtype="float64"):
    return [lambda mesh, i=i: Stage(i, dtype) for i in range(count)]


def one_device(count):
    """Return the loss and the gradients of the same stages on one device."""
    layers = [Stage(i) for i in range(count)]
    x = X
    for layer in layers[:-1]:
        x = layer(x)
    loss = layers[-1].loss_sum(x, Y) * (1 / Y.size)
    loss.backward()
    return loss.item(), {f"stage{i}.linear.weight": layers[i].linear.weight.grad for i in range(count)}


# ---- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3), (2, 1, 4, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_sends_what_its_docstring_says(dtype, shape):
    """For a microbatch it sends an activation behind 64 bytes, and its gradient; then 3 values over dp, 1 over pp."""

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
    last = {("send", "pp"): [2, size], ("all_reduce", "pp"): [2, 8], ("all_reduce", "dp"): [4, 24]}
    assert counts == [first, first, last, last]


def test_one_batch_is_noted_once_however_many_ranks_have_it(capfd):
    def rank(comm):
        model = PipelineModule(stages(2), DeviceMesh(comm, dp=2, tp=2, pp=2), num_microbatches=2)
        for _ in range(2):
            model(X, Y)

    run_local(8, rank)
    assert capfd.readouterr().err.count("minipar: note: ") == 1


# ---- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "count", "pp"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 4, 2),
        ("1f1b", 6, 2),
        ("zb-h1", 3, 3),
        ("zbv", 4, 2),
        ("zbv", 8, 2),
        ("interleaved-1f1b", 2, 2),
        ("interleaved-1f1b", 4, 2),
        ("interleaved-1f1b", 6, 2),
        ("interleaved-1f1b", 3, 1),
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


def test_stages_may_be_modules_that_are_there_already():
    def rank(comm):
        own = [Stage(0), Stage(1)]
        model = PipelineModule(own, DeviceMesh(comm, pp=2), num_microbatches=2)
        loss = model(X, Y).item()
        return loss, own[comm.rank].linear.weight.grad is not None

    assert run_local(2, rank) == [(pytest.approx(one_device(2)[0], rel=1e-12), True)] * 2


@pytest.mark.parametrize("documents", [None, np.array([[0, 1, 2], [0, 0, 1], [0, 1, 0], [0, 0, 0]])])
def test_a_stage_sees_the_ids_of_its_microbatch(documents):
    def rank(comm):
        own = [Stage(0), Stage(1)]
        model = PipelineModule(own, DeviceMesh(comm, pp=2), num_microbatches=2)
        with packed(documents):
            model(X, Y)
        return [None if ids is None else ids.tolist() for ids in own[comm.rank].seen]

    expected = [None, None] if documents is None else [documents[:2].tolist(), documents[2:].tolist()]
    assert run_local(2, rank) == [expected] * 2


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


# ---- replicas --------------------------------------------------------------------------------------------------------

REMEDY = "ZeroOptimizer(model.parameters(), AdamW, mesh.dp, ...)"


def test_an_optimizer_over_other_ranks_is_refused():
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        model = PipelineModule(stages(1), mesh, num_microbatches=2)
        ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        model = PipelineModule(stages(1), mesh, num_microbatches=2)
        with pytest.raises(ValueError) as refused:
            ZeroOptimizer(model.parameters(), SGD, mesh.tp, lr=0.1)
        assert str(refused.value) == (
            f"ZeroOptimizer over tp, ranks {mesh.tp.ranks}: the replicas of this PipelineModule are those of "
            f"mesh.dp, ranks {mesh.dp.ranks}; write {REMEDY}"
        )

    run_local(4, rank)


def test_a_state_of_replicas_that_have_parted_is_refused():
    def rank(comm):
        model = PipelineModule(stages(2), DeviceMesh(comm, dp=2), num_microbatches=2)
        if comm.rank == 1:
            model.parameters()[2].data += 1e-9
        with pytest.raises(ValueError, match="parameters have parted: stage1.linear.weight of rank"):
            model.state_dict()

    run_local(2, rank)
