"""Claims about the device: nothing crosses between host and device unasked, shown on an array that refuses as CuPy
does.

The same functions run on CuPy itself where a GPU is found (`-k cupy` shows which it was).
"""

import ast
from pathlib import Path

import numpy as np
import pytest
import strict_array
from training import config_for, on_each_rank, using

import minipar
from minipar import backend
from minipar.comm import serial
from minipar.nn import GPT, SGD, AdamW, GPTConfig, clip_grad_norm
from minipar.train.data import load_tokens

pytestmark = pytest.mark.sampled(3)

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make_optimizer", [AdamW, lambda parameters: SGD(parameters, 0.1, 0.9, 0.01)])
def test_the_serial_gpt_trains_on_a_device(device, make_optimizer, recompute):
    losses, state = serial_training(make_optimizer, recompute)
    assert all(type(array) is np.ndarray for array in state.values())
    with using(np):
        expected_losses, expected = serial_training(make_optimizer, recompute)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for name in expected:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-9, atol=1e-11)


SHAPE = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --global-batch 4 --steps 2 --microbatches 2 --dtype float64"


def data_parallel_training(flags):
    """Each rank's losses and parameters."""
    tokens = load_tokens(None, vocab_size=256, seq_len=8)
    config = config_for(f"{SHAPE} --clip-grad 1 {flags}", 2)
    return on_each_rank(config, tokens, lambda trainer, results: ([r.loss for r in results], trainer.state_dict()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags",
    [
        "--reduction ring",
        "--reduction ordered",
        "--zero-stage 1",
        "--zero-stage 2 --reduction ordered",
        "--zero-stage 2 --sync-every-microbatch",
        "--zero-stage 3 --recompute full",
        "--zero-stage 1 --zero-replicas 2",
        "--zero-stage 3 --zero-replicas 2 --sync-every-microbatch",
        "--zero-stage 3 --reduction ordered --sync-every-microbatch",
        "--dtype bf16",
        "--dtype fp16 --gradients fp16 --zero-stage 3",
        "--dtype bf16 --reduce-dtype bf16 --zero-stage 1 --zero-replicas 2",
    ],
)
def test_two_data_parallel_ranks_train_on_a_device(device, flags):
    results = data_parallel_training(flags)
    with using(np):
        expected_losses, expected = data_parallel_training(flags)[0]
    assert len(expected) == 16
    for rank, (losses, state) in enumerate(results):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
        assert list(state) == (list(expected) if rank == 0 else [])
    state = results[0][1]
    for name in expected:
        assert type(state[name]) is np.ndarray
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-9, atol=1e-11)


def test_the_stand_in_would_catch_a_forgotten_crossing():
    with using(strict_array):
        model = GPT(CONFIG)
        with pytest.raises(TypeError):
            model.loss(TOKENS[0][:, :8], TOKENS[0][:, 1:])  # host tokens, never sent to the device
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
