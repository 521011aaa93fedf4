"""Claims about a user's own module: layers by size, gradients, a summed loss, state that saves and loads."""

import numpy as np
import pytest

from minipar.autograd import Tensor, cross_entropy_sum, gelu
from minipar.autograd.gradcheck import gradcheck
from minipar.more.llama import RMSNorm
from minipar.nn import GPT, Embedding, GPTConfig, LayerNorm, Linear, Module, Parameter
from minipar.nn.layers import generator

RANDOM = np.random.Generator(np.random.Philox(12))
X = RANDOM.standard_normal((6, 8))
Y = RANDOM.standard_normal((6, 2))


class MLP(Module):
    """A user's regression: 8 -> 32 -> 2 with squared errors."""

    def __init__(self, seed=0, dtype="float64"):
        self.norm = LayerNorm(8, dtype=dtype)
        self.fc1 = Linear(8, 32, name="fc1", seed=seed, dtype=dtype, std=0.5)
        self.fc2 = Linear(32, 2, name="fc2", seed=seed, dtype=dtype, std=0.5, bias=False)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(self.norm(x))))

    def loss_sum(self, x, y):
        error = self(x) - y
        return (error * error).sum()


def test_a_users_module_has_the_gradient_of_its_loss():
    model = MLP()
    layers = {"norm.weight": model.norm, "norm.bias": model.norm, "fc1.weight": model.fc1, "fc1.bias": model.fc1}
    layers |= {"fc2.weight": model.fc2}
    assert list(layers) == [name for name, _ in model.named_parameters()]

    def loss(*leaves):
        for (name, layer), leaf in zip(layers.items(), leaves, strict=True):
            setattr(layer, name.split(".")[1], leaf)
        return model.loss(X, Y)

    gradcheck(loss, [RANDOM.standard_normal(p.shape) for p in model.parameters()])


def test_a_state_is_a_copy_in_row_major_order():
    model = MLP()
    weight = model.fc1.weight
    weight.data = np.asfortranarray(weight.data)
    state = model.state_dict()
    assert all(array.flags.c_contiguous and array.flags.owndata for array in state.values())
    weight.data[...] = 0
    assert state["fc1.weight"].any()


def test_loading_fills_the_arrays_that_are_there():
    """They may be views of flat storage, or an optimizer's."""
    model, other = MLP(), MLP(seed=1)
    assert not np.array_equal(model(X).data, other(X).data)
    arrays = [p.data for p in model.parameters()]
    model.load_state_dict(other.state_dict())
    assert all(p.data is array for p, array in zip(model.parameters(), arrays, strict=True))
    assert np.array_equal(model(X).data, other(X).data)


def test_arrays_and_tensors_are_both_inputs():
    model = MLP(dtype="float32")
    x = RANDOM.standard_normal((3, 8))
    y = model.fc1(x)  # float64 values meet a float32 layer
    assert y.dtype == np.float32 and np.array_equal(y.data, model.fc1(Tensor(x.astype(np.float32))).data)


def test_a_layer_has_the_same_weights_wherever_its_name_is_used():
    config = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2)
    model = GPT(config, seed=3)
    same = Linear(8, 32, name="h.0.mlp.c_fc", seed=3)
    assert np.array_equal(same.weight.data, model.h[0].mlp.c_fc.weight.data)
    assert np.array_equal(Embedding(11, 8, name="wte", seed=3).weight.data, model.wte.weight.data)
    assert not np.array_equal(Linear(8, 32, name="other", seed=3).weight.data, same.weight.data)


@pytest.mark.parametrize(("make", "shape"), [(Linear, (30, 20)), (Embedding, (30, 20))])
def test_a_layers_defaults_are_gpt2s(make, shape):
    """Its weights are in float32, from N(0, 0.02^2) by its name and seed 0; only a Linear has a bias."""
    layer = make(*shape, name="layer")
    drawn = generator(0, "layer.weight").standard_normal(shape) * 0.02
    assert np.array_equal(layer.weight.data, drawn.astype("float32")) and layer.weight.dtype == "float32"
    names = ["weight", "bias"] if make is Linear else ["weight"]
    assert [name for name, _ in layer.named_parameters()] == names


@pytest.mark.parametrize(("make", "eps"), [(LayerNorm, 1e-5), (RMSNorm, 1e-6)])
def test_a_norms_epsilon_is_by_default_its_models(make, eps):
    x = 1e-3 * RANDOM.standard_normal((5, 8))
    x -= x.mean(axis=1, keepdims=True)  # so that both divide by the root of the mean square
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(make(8, dtype="float64")(x).data, expected, rtol=1e-12)
    assert make(8)(x.astype("float32")).dtype == "float32"


def test_target_count_ignores_only_integer_targets_of_minus_100():
    model = MLP()
    assert model.target_count(np.array([[1, -100], [0, 3]])) == 3
    assert model.target_count(np.array([1.0, -100.0])) == 2
    assert model.target_count(np.array([1, 2], dtype=np.uint8)) == 2
    assert type(model.target_count(np.array([1, -100]))) is int


def test_the_mean_loss_is_the_sum_over_the_count():
    class Classifier(MLP):
        def loss_sum(self, x, y):
            return cross_entropy_sum(self(x), y)

    model, targets = Classifier(), np.array([0, 1, -100, 1, -100, 0])
    assert model.loss(X, targets).item() == model.loss_sum(X, targets).item() * (1 / 4)
    assert model.loss(X, np.full(6, -100)).item() == 0
    with pytest.raises(NotImplementedError, match="loss_sum"):
        Linear(2, 3, name="layer").loss(X, Y)  # it defines no sum
    for count in (1, 2):  # the smallest ones
        few = np.array([-100] * (6 - count) + [1] * count)
        assert model.loss(X, few).item() == model.loss_sum(X, few).item() / count


def test_parameters_in_tuples_and_dicts_are_found_once():
    class Net(Module):
        def __init__(self):
            self.first = Linear(2, 3, name="first")
            self.layers = (self.first, Linear(3, 3, name="second"))
            self.heads = {"a": Linear(3, 1, name="a"), "scale": Parameter(np.ones(3))}

    net = Net()
    names = [name for name, _ in net.named_parameters()]
    assert names[:2] == ["first.weight", "first.bias"]
    assert names[-3:] == ["heads.a.weight", "heads.a.bias", "heads.scale"]
    assert len(net.parameters()) == 7 and len(names) == 9
    assert net.parameters() == list(dict.fromkeys(parameter for _, parameter in net.named_parameters()))
    assert net.parameters()[0] is net.first.weight and net.parameters()[-1] is net.heads["scale"]
    assert len(list(net.named_modules())) == 5
