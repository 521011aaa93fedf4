"""Claims about the norm, clipping and the saved state of a pipeline of the user's stages, in every layout."""

import numpy as np
import pytest
from training import bits

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD, AdamW, LayerNorm, Module
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.zero_optimizer import ZeroOptimizer

LAYOUTS = [{}, {"dp": 3}, {"pp": 2}, {"dp": 2, "tp": 3}, {"dp": 2, "tp": 2, "pp": 2}]
STEPS = 4


class Stage(Module):
    """A norm, which every tp rank holds whole, and two split layers."""

    def __init__(self, mesh, i):
        options = {"dtype": "float64", "std": 0.5}
        self.norm = LayerNorm(4, dtype="float64")
        self.up = mp.ColumnParallelLinear(4, 6, mesh.tp, name=f"{i}.up", **options)
        self.down = mp.RowParallelLinear(6, 4, mesh.tp, name=f"{i}.down", **options)

    def forward(self, x):
        return self.down(mp.gelu(self.up(self.norm(x))))

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2.0).sum()


def batch(step, mesh):
    """This replica's share of six samples."""
    draw = np.random.Generator(np.random.Philox(step)).standard_normal
    x, y = draw((6, 4)), draw((6, 4))
    return x[mesh.dp.rank :: mesh.dp.size], y[mesh.dp.rank :: mesh.dp.size]


def make(comm, axes, optimizer=AdamW, **options):
    mesh = DeviceMesh(comm, **axes)
    stages = [lambda mesh, i=i: Stage(mesh, i) for i in range(2)]
    model = PipelineModule(stages, mesh, num_microbatches=2)
    return mesh, model, ZeroOptimizer(model.parameters(), optimizer, mesh.dp, **options)


def clip(model, mesh, max_norm):
    return mp.clip_grad_norm(model.parameters(), max_norm, mesh.dp, mesh.tp, mesh.pp)


def size_of(axes):
    return int(np.prod(list(axes.values()), initial=1))


def run(comm, axes, max_norm=None):
    """Train; return each step's norm and the whole state."""
    mesh, model, optimizer = make(comm, axes, SGD, lr=0.1)
    norms = []
    for step in range(STEPS):
        model(*batch(step, mesh))
        norms.append(clip(model, mesh, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def one_device(max_norm):
    return run_local(1, run, {}, max_norm)[0]


def close(state, expected):
    assert list(state) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("axes", LAYOUTS[1:])
def test_clipping_trains_what_one_device_trains(axes, max_norm):
    norms, state = one_device(max_norm)
    assert max_norm is None or min(norms) > max_norm
    everyone = run_local(size_of(axes), run, axes, max_norm)
    assert all(own == everyone[0][0] for own, _ in everyone)  # the same bits on every rank
    np.testing.assert_allclose(everyone[0][0], norms, rtol=1e-11)
    close(everyone[0][1], state)
    assert [other for _, other in everyone[1:]] == [{}] * (len(everyone) - 1)


# ---- saved and resumed -----------------------------------------------------------------------------------------------


def train(mesh, model, optimizer, steps):
    for step in steps:
        model(*batch(step, mesh))
        clip(model, mesh, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def whole_run(comm, axes):
    mesh, model, optimizer = make(comm, axes, lr=0.1)
    train(mesh, model, optimizer, range(STEPS))
    return bits(model.state_dict())


def first_half(comm, axes):
    mesh, model, optimizer = make(comm, axes, lr=0.1)
    train(mesh, model, optimizer, range(STEPS // 2))
    return model.state_dict(), optimizer.state_dict()


def second_half(comm, axes, state, optimizer_states):
    mesh, model, optimizer = make(comm, axes, lr=0.1)
    model.load_state_dict(state)
    if optimizer_states is not None:
        optimizer.load_state_dict(optimizer_states[comm.rank])
    train(mesh, model, optimizer, range(STEPS // 2, STEPS))
    return bits(model.state_dict())


@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(axes):
    size = size_of(axes)
    halves = run_local(size, first_half, axes)
    state, optimizer_states = halves[0][0], [optimizer for _, optimizer in halves]
    expected = run_local(size, whole_run, axes)[0]
    assert run_local(size, second_half, axes, state, optimizer_states)[0] == expected
    assert run_local(size, second_half, axes, state, None)[0] != expected


@pytest.mark.parametrize("axes", LAYOUTS)
def test_parameters_load_in_every_layout(axes):
    """A state saved on dp 2, tp 2, pp 2 is that of one device, by name; every layout takes it."""

    def saved(comm):
        return make(comm, {"dp": 2, "tp": 2, "pp": 2})[1].state_dict()

    def changed(comm, state):
        model = make(comm, axes)[1]
        model.load_state_dict({name: 2 * array for name, array in state.items()})
        return model.state_dict()

    state = run_local(8, saved)[0]
    assert bits(state) == bits(run_local(1, lambda comm: make(comm, {})[1].state_dict())[0])
    assert bits(run_local(size_of(axes), changed, state)[0]) == bits({name: 2 * a for name, a in state.items()})


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2, "pp": 2}])
@pytest.mark.parametrize("name", ["stage0.up.weight", "stage1.norm.bias"])
def test_another_models_state_is_refused(axes, name):
    state = run_local(1, lambda comm: make(comm, {})[1].state_dict())[0]
    wrong = state | {name: np.ones((8, 8))}
    missing = {other: array for other, array in state.items() if other != name}
    for given, error, says in ((wrong, ValueError, r"\(8, 8\)"), (missing, KeyError, name)):
        with pytest.raises(error, match=says):
            run_local(size_of(axes), lambda comm, given=given: make(comm, axes)[1].load_state_dict(given))
