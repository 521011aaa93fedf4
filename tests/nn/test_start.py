"""Claims about a new model and its optimizer: initial values, settings in every layer, owners, the first step."""

import math

import numpy as np
import pytest

from minipar.autograd import Tensor, rotary
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import (
    GPT,
    SGD,
    AdamW,
    Embedding,
    GPTConfig,
    Linear,
    Llama,
    LlamaConfig,
    MixtralConfig,
    Module,
    Parameter,
    clip_grad_norm,
)
from minipar.nn.layers import generator
from minipar.nn.parameter import Owner

CONFIGS = {
    "gpt2": GPTConfig(11, 6, 8, 2, 2, initializer_range=0.5),
    "llama": LlamaConfig(11, 8, 12, 2, 4, 2, 6, initializer_range=0.5),
    "mixtral": MixtralConfig(11, 8, 12, 2, 4, 2, 6, initializer_range=0.5, num_local_experts=3),
}
RANDOM = np.random.Generator(np.random.Philox(52))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_matrix_is_drawn_by_seed_name_and_range(kind, deferred):
    """GPT-2's projections into the residual stream are divided by sqrt(2 layers); gains are 1 and biases 0."""
    model = CONFIGS[kind].build(seed=7, dtype="float64", deferred=deferred)
    if deferred:
        assert all(p.make is not None and p.data.base.size == 1 for p in model.parameters())
        model.materialize()
    for name, parameter in model.named_parameters():
        std = 0.5 / math.sqrt(2 * 2) if name.endswith("c_proj.weight") else 0.5
        expected = np.full(parameter.shape, float(name.endswith("weight")))
        if parameter.ndim == 2:
            expected = generator(7, name).standard_normal(parameter.shape) * std
        assert np.array_equal(parameter.data, expected), name


def test_every_layer_rotates_with_the_configs_theta():
    model = Llama(LlamaConfig(11, 16, 12, 2, 4, 2, 6, rope_theta=50.0), dtype="float64")
    x, positions = Tensor(RANDOM.standard_normal((2, 5, 16))), np.arange(5)
    seen = []

    def attention(qkv, heads, kv_heads):
        seen.append(qkv)
        return qkv[..., :16]

    for block in model.model.layers:
        layer = block.self_attn
        layer.attention = attention
        layer(x)
        expected = rotary(layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), positions, size=4, theta=50.0)
        assert np.array_equal(seen.pop().data, expected.data)
    assert seen == []


@pytest.mark.parametrize(("kind", "where"), [("gpt2", "wte"), ("llama", "model.embed_tokens")])
def test_a_token_that_is_not_there_is_named_with_its_table(kind, where):
    model = CONFIGS[kind].build()
    with pytest.raises(UsageError, match=rf"^token 11 at \[0, 1\] is not below vocab_size 11 of {where}$"):
        model(np.array([[1, 11]]))
    with pytest.raises(UsageError, match=rf"^token -1 at \[1, 0\] is negative: tokens are 0 to 10 of {where}$"):
        model(np.array([[1, 10], [-1, 0]]))


def test_a_layer_of_one_parameter_refuses_an_empty_state():
    with pytest.raises(UsageError, match="load_state_dict of an empty state: .*load what rank 0 has saved"):
        Embedding(2, 3, name="table").load_state_dict({})


def test_a_gpt_takes_as_many_tokens_as_it_has_positions():
    assert GPT(CONFIGS["gpt2"])(np.zeros((1, 6), int)).shape == (1, 6, 11)


def test_an_embedding_takes_a_list_of_ids():
    table = Embedding(5, 3, name="table")
    assert np.array_equal(table([[4, 0], [4, 1]]).data, table.weight.data[[[4, 0], [4, 1]]])


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_recompute_trains_the_blocks_above_a_frozen_embedding(kind):
    gradients = []
    for recompute in (False, True):
        model = CONFIGS[kind].build(dtype="float64", recompute=recompute)
        model.token_embedding.requires_grad = False
        model.loss(np.array([[1, 2, 3]]), np.array([[2, 3, 4]])).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert [name for name in plain if plain[name] is None] == ["model.embed_tokens.weight"]
    assert recomputed.pop("model.embed_tokens.weight") is None
    assert all(np.array_equal(recomputed[name], plain[name]) for name in recomputed)


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_an_owner_sees_an_optimizer_when_made_and_in_each_step(make):
    seen = []

    class Watching(Owner):
        def check_optimizer(self, parameters):
            seen.append(list(parameters))

    parameters = [Parameter(np.zeros(2)) for _ in range(3)]
    parameters[1].owners = [Watching()]
    optimizer = make(iter(parameters))
    assert seen == [parameters]
    for steps in (1, 2):
        optimizer.zero_grad()
        parameters[0].grad = np.ones(2)
        optimizer.step()
        assert seen == [parameters] * (1 + steps)


class Sharding(Owner):
    """A strategy that holds shards of the values, trebles the mean loss and forgets gradients."""

    def __init__(self, events, holds_values=True):
        self.events, self.holds_values = events, holds_values

    def watch_mean(self, loss):
        self.events.append("watches")
        return loss * 3.0

    def forget_gradients(self):
        self.events.append("forgets")


def test_owners_watch_the_mean_loss_and_forget_gradients():
    class Squares(Module):
        def __init__(self):
            self.a, self.b = Parameter(np.array([3.0])), Parameter(np.array([5.0]))

        def loss_sum(self, x, y):
            return (self.a * self.b * x).sum()

    model, x, y = Squares(), np.array([1.0, 3.0]), np.zeros(2)
    assert model.loss(x, y).item() == 30.0
    events = []
    first, second = Sharding(events), Sharding(events)
    model.a.owners, model.b.owners = [first], [second, first]
    loss = model.loss(x, y)
    assert loss.item() == 9 * 30.0 and events == ["watches"] * 2
    loss.backward()
    model.zero_grad()
    assert events[2:] == ["forgets"] * 2 and model.a.grad is None and model.b.grad is None


def test_a_rank_of_shards_has_no_state_of_its_own():
    model = Linear(2, 3, name="layer")
    state = model.state_dict()
    model.bias.owners = [Sharding([]), Sharding([], holds_values=False)]
    says = r"^this rank holds shards of the parameters: all ranks call the wrapper's state_dict\(\)$"
    with pytest.raises(ValueError, match=says):
        model.state_dict()
    with pytest.raises(ValueError, match="^this rank holds shards of the parameters: load the state before wrapping"):
        model.load_state_dict(state)
    model.bias.owners.pop()
    model.load_state_dict(model.state_dict())


def test_an_owner_by_default_does_nothing():
    owner, loss = Owner(), Tensor(np.ones(()))
    assert owner.watch_mean(loss) is loss and (owner.sharded, owner.holds_values, owner.wrapper) == (False, True, "")
    parameter = Parameter(np.ones(2))
    parameter.owners, parameter.grad = [owner], np.ones(2)
    assert clip_grad_norm([parameter], None) == math.sqrt(2)
    SGD([parameter], lr=1.0).step()
    assert parameter.data.tolist() == [0.0, 0.0]


def test_a_module_without_a_forward_says_so():
    class Own(Module):
        pass

    for call in (Own(), Own().forward):
        with pytest.raises(TypeError, match="^Own does not define forward$"):
            call(1, key=2)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_decays_what_has_two_or_more_dims(momentum):
    shapes = [(), (3,), (1, 1), (2, 3), (2, 1, 2)]
    parameters = [Parameter(np.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = np.full(parameter.shape, 2.0)
    SGD(parameters, lr=0.25, momentum=momentum, weight_decay=4.0).step()
    expected = [1 - 0.25 * (2 + 4 * (len(shape) >= 2)) for shape in shapes]
    assert [set(p.data.reshape(-1).tolist()) for p in parameters] == [{value} for value in expected]


def test_the_first_step_takes_values_that_were_loaded_before():
    """A model in 2 bytes may be loaded after its optimizer was made; from the first step on the masters count."""
    parameter = Parameter(np.ones(4, "float16"))
    optimizer = AdamW([parameter], lr=2.0**-13)
    parameter.data[...] = 3
    for step in (1, 2, 3):
        parameter.grad = np.ones(4, "float16")
        optimizer.step()
        optimizer.zero_grad()
        np.testing.assert_allclose(optimizer.masters[0], 3 - step * 2.0**-13, rtol=1e-6)
        assert parameter.data.tolist() == [3.0] * 4  # nearer than the next float16
        parameter.data[...] = 2  # after the first step the master's value stays


def test_adamw_squares_gradients_of_2_bytes_in_float32():
    """300^2 is more than float16's largest value, and 1e-4^2 is less than its smallest one."""
    for size in (300.0, 1e-4):
        parameter = Parameter(np.ones(3, "float16"))
        optimizer = AdamW([parameter], betas=(0.5, 0.5))
        parameter.grad = np.full(3, size, "float16")
        optimizer.step()
        exact = float(np.float16(size))
        np.testing.assert_allclose(optimizer.exp_avg[0], exact / 2, rtol=1e-6)
        np.testing.assert_allclose(optimizer.exp_avg_sq[0], exact**2 / 2, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "each"), [("float16", 12), ("float32", 8), ("float64", 16)])
def test_the_ledger_counts_moments_and_masters(dtype, each):
    """Each element has two moments, and one in 2 bytes has a master in float32, too."""
    parameters = [Parameter(np.ones((10, 10), dtype)), Parameter(np.ones(7, dtype))]
    with MemoryLedger().recording() as ledger:
        optimizer = AdamW(parameters)
        assert ledger.held["optimizer"] == ledger.total() == each * 107
    del optimizer


def test_a_name_used_twice_is_told_with_its_remedy():
    layers = [Linear(4, 4, name="up.fc", bias=False), Linear(4, 8, name="up.fc", bias=False)]
    with pytest.raises(UsageError) as error:
        SGD([layer.weight for layer in layers])
    assert str(error.value) == (
        'two parameters of the model, of shapes (4, 4) and (4, 8), are drawn by the name "up.fc.weight" and seed 0, '
        'and so start from the same values: give each layer a name of its own, such as name="blocks.0.up.fc", '
        "or another seed"
    )
