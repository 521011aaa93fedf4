"""Claims about ZeroOptimizer over a serial or split model: it sums what the ranks hold, to one device's gradient."""

import numpy as np
import pytest
from training import MLP, bits, text

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.nn import SGD


def points(rank, step=0):
    """Two samples of this rank for an MLP."""
    draw = np.random.Generator(np.random.Philox(100 * step + rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


def zero_step(comm, loss_of):
    """Take a step of ZeroOptimizer over an MLP; return the first weights."""
    model = MLP()
    optimizer = mp.ZeroOptimizer(model.parameters(), SGD, comm, "ordered", lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    return model.first.weight.data.copy()


def test_zero_optimizer_adds_up_shares_of_the_global_mean():
    def loss_of(model, rank, size):
        return model.loss_sum(*points(rank)) / (2 * size)

    batch = [np.concatenate(arrays) for arrays in zip(points(0), points(1), strict=True)]
    (expected,) = run_local(1, lambda comm: zero_step(comm, lambda model: model.loss(*batch)))
    for weights in run_local(2, lambda comm: zero_step(comm, lambda model: loss_of(model, comm.rank, 2))):
        np.testing.assert_allclose(weights, expected, rtol=1e-12)


def gpt():
    return mp.GPT(mp.GPTConfig(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2), dtype="float64")


def zero_over_tp(comm, x, y):
    """With sequence parallelism, where a rank's gradient of a LayerNorm covers its own tokens alone."""
    mesh, model = DeviceMesh(comm, tp=comm.size), gpt()
    mp.tensor_parallel(model, mesh.tp, sequence=True)
    optimizer = mp.ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
    model.loss(x, y).backward()
    optimizer.step()
    return model.ln_f.weight.data


def zero_over_cp(comm, x, y):
    model = gpt()
    context = mp.context_parallel(model, comm)
    optimizer = mp.ZeroOptimizer(model.parameters(), SGD, comm, lr=0.1)
    (model.loss_sum(context.part(x), context.part(y)) / y.size).backward()
    optimizer.step()
    return model.ln_f.weight.data


def sums_by_hand_over_cp(comm, x, y):
    model = gpt()
    context = mp.context_parallel(model, comm)
    (model.loss_sum(context.part(x), context.part(y)) / y.size).backward()
    for p in model.parameters():
        p.fold_tied_gradients()
        comm.all_reduce(p.grad)
    SGD(model.parameters(), lr=0.1).step()
    return model.ln_f.weight.data


@pytest.mark.parametrize("script", [zero_over_tp, zero_over_cp, sums_by_hand_over_cp])
def test_gradients_of_a_ranks_own_tokens_are_completed(script):
    serial, (x, y) = gpt(), text(range(2))
    serial.loss(x, y).backward()
    SGD(serial.parameters(), lr=0.1).step()
    for weight in run_local(2, script, x, y):
        np.testing.assert_allclose(weight, serial.ln_f.weight.data, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_ordered_sums_of_zero_optimizer_are_one_devices_bits(size):
    """Two backward passes of a step add up, zero_grad of the model counts too, and lr is a schedule."""
    rates = [0.1, 0.05, 0.0]

    def rank(comm):
        model = MLP()
        optimizer = mp.ZeroOptimizer(model.parameters(), SGD, comm, "ordered", lr=1.0)
        for step, lr in enumerate(rates):
            optimizer.lr = lr
            model.loss_sum(*points(comm.rank, step)).backward()
            model.loss_sum(*points(comm.rank, step + 10)).backward()
            optimizer.step()
            (model if step == 0 else optimizer).zero_grad()
        return bits(model.state_dict())

    model = MLP()
    optimizer = SGD(model.parameters(), lr=1.0)
    for step, lr in enumerate(rates):
        total = [np.zeros(p.shape) for p in model.parameters()]
        for each in range(size):
            model.zero_grad()
            model.loss_sum(*points(each, step)).backward()
            model.loss_sum(*points(each, step + 10)).backward()
            total = [before + p.grad for before, p in zip(total, model.parameters(), strict=True)]
        for p, gradient in zip(model.parameters(), total, strict=True):
            p.grad = gradient
        optimizer.lr = lr
        optimizer.step()
    assert run_local(size, rank) == [bits(model.state_dict())] * size


class Halving(SGD):
    """A user's own optimizer, with a setting that no other one has."""

    def __init__(self, parameters, lr, factor):
        super().__init__(parameters, lr)
        self.factor = factor

    def update(self, i, parameter, gradient):
        super().update(i, parameter, gradient * self.factor)


def test_a_zero_optimizer_has_the_users_own_setting():
    def rank(comm, factor):
        model = MLP()
        optimizer = mp.ZeroOptimizer(model.parameters(), Halving, comm, lr=0.1, factor=0.5)
        optimizer.factor = factor
        model.loss_sum(*points(comm.rank)).backward()
        optimizer.step()
        return bits(model.state_dict())

    half, none = (run_local(2, rank, factor)[0] for factor in (0.5, 0.0))
    assert none == bits(MLP().state_dict()) != half


def test_gradients_that_no_step_has_used_are_summed_anew():
    """With sequence parallelism a norm's gradient is a term on each rank of tp, also after a step that was left out."""

    def rank(comm, tp):
        mesh = DeviceMesh(comm, tp=tp)
        model = mp.GPT(mp.GPTConfig(17, 8, 16, 1, 2), dtype="float64")
        mp.tensor_parallel(model, mesh.tp, sequence=True)
        optimizer = mp.ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        norms = []
        for _ in range(2):
            model.loss(np.arange(8)[None], np.arange(1, 9)[None]).backward()
            norms.append(mp.clip_grad_norm(model.parameters(), None, mesh.dp, mesh.tp))
            optimizer.zero_grad()
        return norms

    (one_device, _), *_ = run_local(1, rank, 1)
    for first, second in run_local(2, rank, 2):
        assert first == second == pytest.approx(one_device, rel=1e-12)
