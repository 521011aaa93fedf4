"""Claims about what optimizers and models take: every spelling that can be meant, and scripts that look odd."""

import numpy as np
import pytest
import strict_array
from training import small_gpt, using

import minipar as mp
from minipar.more.precision import enable_two_bytes
from minipar.nn import SGD, AdamW
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.module import array_of

GPT, LLAMA = mp.GPTConfig(11, 8, 8, 1, 2), mp.LlamaConfig(11, 8, 8, 1, 2)
MODELS = {
    "GPT": lambda **options: mp.GPT(GPT, **options),
    "Llama": lambda **options: mp.Llama(LLAMA, **options),
    "Mixtral": lambda **options: mp.Mixtral(mp.MixtralConfig(11, 8, 8, 1, 2, 2), **options),
}


def gpt_and_optimizer():
    model = small_gpt(layers=1)
    return model, AdamW(model.parameters(), lr=0.1)


def backward(model, seed=0):
    rows = np.random.Generator(np.random.Philox(seed)).integers(0, 17, (2, 9))
    model.loss(rows[:, :-1], rows[:, 1:]).backward()


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_optimizers_take_turns_and_gradients_are_assigned():
    model, optimizer = gpt_and_optimizer()
    parameter = model.parameters()[-1]
    for turn in (optimizer, SGD(model.parameters()), optimizer):
        parameter.grad = np.ones_like(parameter.data)
        turn.step()
    assert optimizer.steps == 2


def test_another_models_step_makes_no_graph_too_old():
    """As a generator's loss goes through a discriminator, and adds to its gradients."""
    (first, optimizer), (second, _) = gpt_and_optimizer(), gpt_and_optimizer()
    x = np.zeros((1, 8), int)
    loss = second.loss(x, x)
    backward(first)
    optimizer.step()
    loss.backward()
    assert second.parameters()[0].grad.any()


def test_a_frozen_parameter_stays_in_a_serial_model():
    """The embedding of a GPT, whose head would give it a gradient."""
    model, optimizer = gpt_and_optimizer()
    frozen = model.parameters()[0]
    frozen.requires_grad = False
    before = frozen.data.copy()
    backward(model)
    optimizer.step()
    assert np.array_equal(frozen.data, before)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_models_defaults_are_seed_0_float32_and_no_dropout(name):
    made, explicit = MODELS[name](), MODELS[name](seed=0, dtype="float32")
    state, expected = made.state_dict(), explicit.state_dict()
    assert all(np.array_equal(state[name], expected[name]) for name in expected)
    assert {array.dtype for array in state.values()} == {np.dtype("float32")}
    tokens = np.array([[1, 2, 3]])
    with dropping(DropoutKeys(0, 0, [0])):
        assert np.array_equal(made(tokens).data, explicit(tokens).data)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), (np.float32, "float32"), (np.dtype("float64"), "float64")],
)
def test_a_dtype_has_numpys_names(dtype, name):
    enable_two_bytes()
    model = mp.GPT(GPT, dtype=dtype)
    assert {str(p.data.dtype) for p in model.parameters()} == {name}


class Foreign:
    """A tensor of another library: it has a dtype of its own, and gives its values as an array."""

    dtype = "torch.int64"

    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 2]])


def test_a_foreign_tensor_is_read_and_an_array_stays_where_it_is():
    model, ids = mp.GPT(GPT), np.array([[1, 2]])
    assert model.loss(Foreign(), Foreign()).item() == model.loss(ids, ids).item()
    assert array_of(ids) is ids
    on_device = strict_array.asarray(ids)
    with using(strict_array):
        assert array_of(on_device) is on_device  # not copied to the host, which CuPy refuses
