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
from training import run_until, using

import minipar
from minipar import backend
from minipar.comm import serial
from minipar.nn import GPT, SGD, AdamW, GPTConfig
from minipar.parallel.grad_norm import clip_grad_norm

CONFIG = GPTConfig(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2)
RANDOM = np.random.Generator(np.random.Philox(8))
TOKENS = RANDOM.integers(0, 17, (3, 4, 9))


def serial_training(make_optimizer, recompute):
    """Three steps of the serial GPT; returns the losses and the final parameters."""
    model = GPT(CONFIG, dtype="float64", recompute=recompute)
    optimizer, losses = make_optimizer(model.parameters()), []
    for rows in TOKENS:
        rows = backend.from_host(rows.copy())
        model.zero_grad()
        loss = model.loss(rows[:, :8], rows[:, 1:])
        loss.backward()
        clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def with_momentum(parameters):
    return SGD(parameters, 0.1, 0.9)


@pytest.mark.parametrize(("make_optimizer", "recompute"), [(AdamW, False), (with_momentum, True)])
def test_the_serial_gpt_trains_on_a_device(device, make_optimizer, recompute):
    losses, state = serial_training(make_optimizer, recompute)
    assert all(type(array) is np.ndarray for array in state.values())
    with using(np):
        expected_losses, expected = serial_training(make_optimizer, recompute)
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


# ---- what the array module has ---------------------------------------------------------------------------------------


def test_a_forgotten_crossing_is_an_error():
    with using(strict_array):
        model = GPT(CONFIG)
        with pytest.raises(TypeError, match="Implicit conversion"):
            np.asarray(model.wte.weight.data)


def xp_names():
    """Every `xp.NAME` and `xp.NAME.METHOD` in the package, as (file, [NAME, ...])."""
    for path in sorted(Path(minipar.__file__).parent.rglob("*.py")):
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
        for rank in range(4):
            backend.use_device("cuda", rank)
    assert used == [rank % gpus for rank in range(4)]
