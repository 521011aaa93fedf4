"""Claims about what optimizers and models take: every spelling that can be meant, and scripts that look odd."""

import numpy as np
import pytest
import strict_array
from training import MLP, small_gpt, using

from minipar import nn
from minipar.more.precision import enable_two_bytes
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.module import array_of
from minipar.parallel.placement import attach_placements

GPT, LLAMA = nn.GPTConfig(11, 8, 8, 1, 2), nn.LlamaConfig(11, 8, 8, 1, 2)
MODELS = {
    "GPT": lambda **options: nn.GPT(GPT, **options),
    "Llama": lambda **options: nn.Llama(LLAMA, **options),
    "Mixtral": lambda **options: nn.Mixtral(nn.MixtralConfig(11, 8, 8, 1, 2, 2), **options),
}
FINE = {"lr": [0, 1e-3, np.float32(0.1)], "eps": [0, 1e-6], "weight_decay": [0, 0.1], "betas": [(0, 0), [0.8, 0.9]]}


def gpt_and_optimizer():
    model = small_gpt(layers=1)
    return model, AdamW(model.parameters(), lr=0.1)


def backward(model, seed=0):
    rows = np.random.Generator(np.random.Philox(seed)).integers(0, 17, (2, 9))
    model.loss(rows[:, :-1], rows[:, 1:]).backward()


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FINE)
def test_a_setting_may_be_0_and_of_any_kind_of_number(name):
    for value in FINE[name]:
        optimizer = AdamW(MLP().parameters(), **{name: value})
        setattr(optimizer, name, value)
        assert getattr(optimizer, name) == value


def test_gradients_of_several_backwards_add_up_in_one_step():
    model, optimizer = gpt_and_optimizer()
    for _ in range(2):
        backward(model)
        backward(model, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 2


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
    model = nn.GPT(GPT, dtype=dtype)
    assert {str(p.data.dtype) for p in model.parameters()} == {name}


def test_layers_in_nested_lists_are_trained():
    model = Module()
    model.blocks = [[Linear(2, 2, name="a")], {"up": (Linear(2, 2, name="b"),)}]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.up.0.weight", "blocks.1.up.0.bias"]


def test_one_layer_twice_and_layers_of_other_seeds_are_fine():
    model = Module()
    model.one, model.two = Linear(4, 4, name="fc"), Linear(4, 4, name="fc", seed=1)
    model.again = model.one
    assert not np.array_equal(model.one.weight.data, model.two.weight.data)
    attach_placements(model)
    AdamW(model.parameters())


def test_a_state_of_integers_or_other_floats_is_taken():
    model = small_gpt(layers=1)
    for dtype in (int, "f2"):
        model.load_state_dict({name: np.ones(array.shape, dtype) for name, array in model.state_dict().items()})
        assert all((p.data == 1).all() and p.data.dtype == np.float64 for p in model.parameters())
    Module().load_state_dict({})


class Foreign:
    """A tensor of another library: it has a dtype of its own, and gives its values as an array."""

    dtype = "torch.int64"

    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 2]])


def test_a_foreign_tensor_is_read_and_an_array_stays_where_it_is():
    model, ids = nn.GPT(GPT), np.array([[1, 2]])
    assert model.loss(Foreign(), Foreign()).item() == model.loss(ids, ids).item()
    assert array_of(ids) is ids
    on_device = strict_array.asarray(ids)
    with using(strict_array):
        assert array_of(on_device) is on_device  # not copied to the host, which CuPy refuses
