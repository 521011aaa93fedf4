"""Claims about the device: nothing crosses to it or from it unasked, shown on an array that refuses as CuPy does.

The same functions run on CuPy itself where a GPU is found (`-k cupy` shows which it was).
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import strict_array
from combinations import TEXT, config_of, equals_one_device
from training import run_until, trainer_for, using

import minipar as mp
from minipar import backend
from minipar.autograd import embedding
from minipar.comm import serial
from minipar.errors import UsageError
from minipar.nn import GPT, SGD, AdamW, GPTConfig
from minipar.parallel.grad_norm import clip_grad_norm

CONFIG = GPTConfig(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2)
RANDOM = np.random.Generator(np.random.Philox(8))
TOKENS = RANDOM.integers(0, 17, (3, 4, 9))


def serial_training(make_optimizer, recompute):
    """Three steps of the serial GPT on NumPy's tokens; returns the losses, the final parameters, and what waited."""
    strict_array.waits.clear()
    model = GPT(CONFIG, dtype="float64", recompute=recompute)
    optimizer, losses = make_optimizer(model.parameters()), []
    for rows in TOKENS:
        model.zero_grad()
        loss = model.loss(rows[:, :8], rows[:, 1:])
        loss.backward()
        clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    waits = list(strict_array.waits)
    return losses, model.state_dict(), waits


def with_momentum(parameters):
    return SGD(parameters, 0.1, 0.9)


@pytest.mark.parametrize(("make_optimizer", "recompute"), [(AdamW, False), (with_momentum, True)])
def test_the_serial_gpt_trains_on_a_device(device, make_optimizer, recompute):
    losses, state, waits = serial_training(make_optimizer, recompute)
    assert waits == ["get", "get"] * 3 or device is not strict_array  # in each step for the norm, and for the loss
    assert all(type(array) is np.ndarray for array in state.values())
    with using(np):
        expected_losses, expected, _ = serial_training(make_optimizer, recompute)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for name in expected:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-9, atol=1e-11)


LAYOUTS = [
    "--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch --reduction ring --clip-grad 1",
    "--dp 4 --zero-stage 3 --zero-replicas 2 --recompute full",
    "--tp 2 --dp 2 --zero-stage 3 --sequence-parallel --clip-grad 1",
    "--model llama --tp 2 --cp 2 --zero-stage 1 --sequence-parallel",
    "--model mixtral --experts 4 --dp 2 --ep 2 --zero-stage 1 --clip-grad 1",
    "--pp 2 --dp 2 --schedule interleaved-1f1b --microbatches 2 --zero-stage 1 --recompute full",
    "--pp 2 --dp 2 --schedule zb-h2 --microbatches 2 --zero-stage 2 --dropout 0.1",
    "--tp 2 --pp 2 --dp 2 --schedule zbv --microbatches 2 --zero-stage 3 --sequence-parallel",
    "--tp 2 --pp 2 --dp 2 --schedule 1f1b --microbatches 2 --zero-stage 1 --sequence-parallel --clip-grad 1",
]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_every_layout_trains_on_a_device_as_on_the_host(device, flags):
    assert equals_one_device(flags, exact=False) == []


def test_a_step_of_the_trainer_waits_for_its_losses_and_its_norm(device):
    trainer = trainer_for(config_of("--microbatches 2 --clip-grad 1"), TEXT, serial())
    strict_array.waits.clear()
    trainer.step(0)
    assert strict_array.waits == ["get", "get"] or device is not strict_array  # all microbatches' losses in one copy


@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--dtype float16 --zero-stage 3"])
def test_two_bytes_train_on_a_device(device, flags):
    state, reports = run_until(TEXT, config_of(f"--dp 2 {flags}"))
    with using(np):
        expected, expected_reports = run_until(TEXT, config_of(f"--dp 2 {flags}"))
    np.testing.assert_allclose(reports, expected_reports, rtol=1e-12)
    for name in expected:
        assert type(state[name]) is np.ndarray
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-9, atol=1e-11)


def test_device_arrays_are_resumed_under_another_layout(device, tmp_path):
    before = "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 1 --sequence-parallel --global-batch 8 --clip-grad 1"
    after = "--dp 2 --pp 2 --schedule gpipe --microbatches 2 --zero-stage 3 --global-batch 8 --clip-grad 1"
    whole, reports = run_until(TEXT, config_of(before))
    run_until(TEXT, config_of(before), tmp_path, 1)
    state, later = run_until(TEXT, config_of(f"{after} --resume {tmp_path}"))
    np.testing.assert_allclose(later, reports[1:], rtol=1e-11)
    for name, array in whole.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-8, atol=1e-11)


def test_wrong_ids_on_the_device_are_refused(device):
    rows = backend.from_host(TOKENS[0])
    with pytest.raises(UsageError, match=r"target \d+ at \[0, 0\]"):
        GPT(CONFIG).loss_sum(rows[:, :8], rows[:, 1:] + 17)


MIXED = {
    "arithmetic": lambda x, a: 1 / (a - (x * a + a) / a),
    "matmul": lambda x, a: a.T @ x + x.T @ a,
    "an index": lambda x, a: x[np.array([2, 0, 2])] * x[np.array([0, 0, 1]), :],
    "a mask": lambda x, a: x[a > 0] + mp.where(a > 0, x, a).sum(),
    "joined": lambda x, a: mp.concatenate([x, a]) @ mp.Tensor(a.T),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_and_numpys_arrays_are_mixed_on_a_device(name, device):
    def run():
        x, a = RANDOM.standard_normal((2, 3, 3))
        x = mp.Parameter(x)
        y = MIXED[name](x, a)
        y.backward(np.cos(np.arange(y.size)).reshape(y.shape))
        return backend.to_host(y.data), backend.to_host(x.grad)

    start = RANDOM.bit_generator.state
    found = run()
    with using(np):
        RANDOM.bit_generator.state = start
        np.testing.assert_allclose(np.concatenate(found, None), np.concatenate(run(), None), rtol=1e-12)


@pytest.mark.parametrize("take", [lambda x, i: embedding(x, i), lambda x, i: x[i], lambda x, i: x[i, :]])
def test_what_an_index_repeats_is_added_in_an_order_of_its_own(take, device):
    def gradient(others):
        x = mp.Parameter(np.zeros((9, 2), np.float32))
        index = np.where(np.arange(500) % 3, RANDOM.integers(1, 8, 500), 8 if others else 1)
        take(x, index).backward(np.where(index[:, None] == 8, 1e30, 0.1).astype(np.float32) * np.ones(2, np.float32))
        return backend.to_host(x.grad), np.bincount(index, minlength=9)

    start = RANDOM.bit_generator.state
    for others in (False, True):
        RANDOM.bit_generator.state = start
        sums, counts = gradient(others)
        np.testing.assert_allclose(sums[2:8], 0.1 * counts[2:8, None] * np.ones(2), rtol=1e-6)
    assert (sums[0] == 0).all() and (sums[8] > 1e32).all()


# ---- what the array module has ---------------------------------------------------------------------------------------


def test_a_forgotten_crossing_is_an_error():
    with using(strict_array):
        model = GPT(CONFIG)
        with pytest.raises(TypeError, match="Implicit conversion"):
            np.asarray(model.wte.weight.data)


def xp_names():
    """Every `xp.NAME` and `xp.NAME.METHOD` in the package, as (file, [NAME, ...])."""
    for path in sorted(Path(mp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            chain = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if chain and isinstance(node, ast.Name) and node.id == "xp" and chain[0] not in ("module", "_use"):
                yield path.name, chain


def test_every_name_taken_from_the_array_module_is_in_cupy():
    import cupy

    names = list(xp_names())
    assert len({tuple(chain) for _, chain in names}) > 20
    for file, chain in names:
        found = cupy
        for name in chain:
            assert hasattr(found, name), f"{file}: xp.{'.'.join(chain)} is not in cupy"
            found = getattr(found, name)


def test_one_rank_alone_copies_nothing_to_the_host(monkeypatch):
    """Its sum is what it has: the gradients of a single GPU stay there."""

    def refuse(array):
        raise AssertionError("a copy to the host")

    monkeypatch.setattr("minipar.comm.communicator.to_host", refuse)
    with using(strict_array):
        comm, x = serial(), backend.xp.ones(5)
        assert comm.all_reduce(x) is comm.broadcast(x) is comm.all_reduce(x, async_op=True).wait() is x


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_ranks_take_the_gpus_in_turns(gpus, monkeypatch):
    used = []

    class Device:
        def __init__(self, number):
            self.number = number

        def use(self):
            used.append(self.number)

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: gpus), Device=Device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    with using(np):
        mp.launch(lambda world: mp.use_device("cuda"), threads=4)
    assert sorted(used) == sorted(rank % gpus for rank in range(4))
    with pytest.raises(UsageError, match="cuda:1"):
        mp.use_device("cuda:1")
