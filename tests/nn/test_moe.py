"""Claims about Mixtral: names and sizes, the router's choice, experts without tokens, its files, and every gradient."""

import json
from dataclasses import replace

import numpy as np
import pytest

from minipar.autograd import Tensor, concatenate, flop_counter
from minipar.autograd.gradcheck import gradcheck
from minipar.errors import UsageError
from minipar.nn import AdamW, Mixtral, MixtralConfig, MoE
from minipar.nn.moe import rows_by_expert, rows_within_capacity
from minipar.nn.pretrained import load_pretrained, save_pretrained

SMALL = MixtralConfig(11, 8, 12, 2, 4, 2, 6, num_local_experts=4, num_experts_per_tok=2)
TIED = replace(SMALL, tie_word_embeddings=True)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])
TARGETS = np.array([[2, 3, 4, 5, 6], [0, 10, 0, 5, -100]])
RANDOM = np.random.Generator(np.random.Philox(20))


def layer_of(experts=4, top_k=2, router=None):
    """A layer of experts on its own, with hidden 8; `router` is its matrix."""
    config = replace(SMALL, num_local_experts=experts, num_experts_per_tok=top_k)
    layer: MoE = Mixtral(config, seed=1, dtype="float64").model.layers[0].mlp
    for parameter in layer.parameters():
        parameter.data[...] = RANDOM.standard_normal(parameter.shape)
    if router is not None:
        layer.gate.weight.data[...] = router
    return layer


def test_names_and_shapes_are_those_of_mixtrals_files():
    block = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8)}
    block |= {"self_attn.o_proj": (8, 8), "block_sparse_moe.gate": (4, 8)}
    for e in range(4):
        shapes = {"w1": (12, 8), "w2": (8, 12), "w3": (12, 8)}
        block |= {f"block_sparse_moe.experts.{e}.{name}": shape for name, shape in shapes.items()}
    block |= {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    expected = {"model.embed_tokens.weight": (11, 8)}
    expected |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    expected |= {"model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    shapes = {name: p.shape for name, p in Mixtral(SMALL).named_parameters()}
    assert shapes == expected and list(shapes) == list(expected)


def test_mixtral_8x7b_has_the_published_parameters():
    """46.7B in all and 12.9B for each token (arXiv 2401.04088, section 1); `transformers` counts 46,702,792,704."""
    assert MixtralConfig().parameters == 46_702_792_704
    assert round(MixtralConfig().active_parameters / 1e9, 1) == 12.9


@pytest.mark.parametrize("config", [SMALL, TIED, replace(SMALL, num_experts_per_tok=4)])
def test_a_config_counts_parameters_and_products_of_k_experts(config):
    model = config.build(dtype="float64")
    assert type(model) is Mixtral and config.parameters == sum(p.size for p in model.parameters())
    idle = config.num_local_experts - config.num_experts_per_tok
    assert config.parameters - config.active_parameters == 2 * idle * 3 * 8 * 12
    flops = []
    with flop_counter(flops.append):
        loss = model.loss_sum(TOKENS, TARGETS)
        assert sum(flops) == config.forward_flops(2, 5)
        loss.backward()
    assert sum(flops) == 3 * config.forward_flops(2, 5)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_the_gradient_of_the_whole_model_passes_the_checker(config):
    model = Mixtral(replace(config, vocab_size=5, num_hidden_layers=1, intermediate_size=3), dtype="float64")
    names = [name for name, _ in model.named_parameters()]
    values = [RANDOM.standard_normal(p.shape) * 0.5 for p in model.parameters()]
    modules = dict(model.named_modules())

    def loss(*leaves):
        for name, leaf in zip(names, leaves, strict=True):
            modules[name.rpartition(".")[0]].weight = leaf
        if config.tie_word_embeddings:
            model.head_weight = leaves[0]  # one leaf in both places: its gradient must hold both uses
        return model.loss(TOKENS % 5, TARGETS.clip(-1) % 5)

    gradcheck(loss, values)


def test_recompute_gives_the_same_bits():
    results = []
    for recompute in (False, True):
        model = Mixtral(SMALL, dtype="float64", recompute=recompute)
        loss = model.loss(TOKENS, TARGETS)
        loss.backward()
        results.append([loss.item(), *(p.grad.tobytes() for p in model.parameters())])
    assert results[0] == results[1]


# ---- the layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (3, 1), (5, 3), (2, 2), (1, 1)])
def test_the_layer_is_each_tokens_weighted_sum_of_its_experts(experts, top_k):
    """Token by token and expert by expert, in plain NumPy."""
    layer = layer_of(experts, top_k)
    x = RANDOM.standard_normal((2, 3, 8))
    y = layer(Tensor(x)).data
    assert y.shape == x.shape
    for token, result in zip(x.reshape(-1, 8), y.reshape(-1, 8), strict=True):
        powers = np.exp(layer.gate.weight.data @ token)
        best = sorted(range(experts), key=lambda e: -powers[e])[:top_k]
        total = np.zeros(8)
        for e in best:
            w1, w2, w3 = (getattr(layer.experts[e], name).weight.data for name in ("w1", "w2", "w3"))
            gate = w1 @ token
            total += powers[e] / powers[best].sum() * (w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ token)))
        np.testing.assert_allclose(result, total, rtol=1e-12)


def test_of_equal_probabilities_the_first_experts_win():
    router = np.zeros((5, 8))
    router[:, 0] = [0, 1, 0, 1, 0]
    layer = layer_of(5, 3, router)
    x = np.zeros((2, 8))
    x[:, 0] = [1.0, -1.0]
    indices, weights = layer.route(Tensor(x))
    assert indices.tolist() == [[1, 3, 0], [0, 2, 4]]
    assert np.array_equal(weights.data.sum(-1), [1, 1]) and np.ptp(weights.data[1]) == 0


@pytest.mark.parametrize(("experts", "top_k"), [(17, 2), (40, 40), (64, 5), (200, 3)])
def test_of_many_equal_experts_the_first_win(experts, top_k):
    """NumPy sorts up to 16 values stably in any case."""
    layer = layer_of(experts, top_k, np.zeros((experts, 8)))
    indices, _ = layer.route(Tensor(RANDOM.standard_normal((5, 8))))
    assert indices.tolist() == [list(range(top_k))] * 5
    layer.bias = np.arange(experts) % 2 * 0.5  # odd experts come first, and among them the first of equals
    indices, _ = layer.route(Tensor(RANDOM.standard_normal((5, 8))))
    assert indices.tolist() == [sorted(range(experts), key=lambda e: (-(e % 2), e))[:top_k]] * 5


def test_a_capacity_keeps_the_first_of_many_tokens():
    layer = layer_of(3, 1, np.outer([1, 0, -1], np.ones(8)))
    layer.capacity_factor = 0.9
    x = RANDOM.standard_normal((1, 200, 8))  # a token whose sum is positive chooses expert 0, another one expert 2
    y = layer(Tensor(x)).data[0]
    first, last = (np.flatnonzero(x[0].sum(-1) * sign > 0)[:60] for sign in (1, -1))  # 60 = 0.9 * 200 / 3
    assert np.flatnonzero(y.any(-1)).tolist() == sorted([*first, *last])


def test_experts_without_tokens_have_zero_gradients_and_decay():
    layer = layer_of(4, 2, np.outer([3, -3, 2, -3], np.ones(8)))
    x = np.abs(RANDOM.standard_normal((1, 6, 8)))
    assert set(layer.route(Tensor(x[0]))[0].reshape(-1)) == {0, 2}
    layer(Tensor(x)).sum().backward()
    before = {name: p.data.copy() for name, p in layer.named_parameters()}
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    AdamW(layer.parameters(), lr=0.1, weight_decay=0.5).step()
    for e, expert in enumerate(layer.experts):
        for name, p in expert.named_parameters():
            assert p.grad.any() == (e in (0, 2))
            if not p.grad.any():
                assert np.array_equal(p.data, before[f"experts.{e}.{name}"] * (1 - 0.1 * 0.5))


def test_an_expert_multiplies_all_its_tokens_in_one_product():
    layer = layer_of(3, 2)
    products = []
    with flop_counter(products.append):
        layer(Tensor(RANDOM.standard_normal((2, 4, 8))))
    assert len(products) == 1 + 3 * 3 and sum(products[1:]) == 3 * 2 * (2 * 4 * 2) * 8 * 12


def test_a_strategy_replaces_what_runs_the_experts():
    """It gets the rows of all tokens and slots, sorted by expert, and how many there are for each of all experts."""
    layer = layer_of()
    x, seen, run_experts = Tensor(RANDOM.standard_normal((2, 3, 8))), [], layer.run_experts

    def run(rows, counts):
        seen.append((rows.shape, len(counts), sum(counts)))
        return run_experts(rows, counts)

    expected = layer(x).data
    layer.run_experts, experts = run, layer.experts
    assert np.array_equal(layer(x).data, expected) and seen == [((12, 8), len(experts), 12)]


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 5), (5, 0, 0), (1, 2, 2)])
def test_each_expert_runs_on_its_stretch_of_rows(counts):
    layer = layer_of(3)
    x = RANDOM.standard_normal((5, 8))
    parts = np.split(x, np.cumsum(counts)[:-1])
    expected = [expert(Tensor(part)).data for expert, part in zip(layer.experts, parts, strict=True)]
    np.testing.assert_array_equal(layer.run_experts(Tensor(x), np.array(counts)).data, np.concatenate(expected))
    gradcheck(lambda x: (layer.run_experts(x, np.array(counts)) ** 2).sum(), [x])
    gradcheck(lambda *parts: (concatenate(parts) ** 2).sum(), [part for part in parts if part.size])


# ---- sizes and files -------------------------------------------------------------------------------------------------


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(ValueError, match="top-k 5 is more than experts 4"):
        replace(SMALL, num_experts_per_tok=5)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_export_and_load_return_the_same_model(config, tmp_path):
    model = Mixtral(config, dtype="float64")
    directory = tmp_path / "new" / "too"
    save_pretrained(model, directory)
    loaded = load_pretrained(directory, dtype="float64")
    assert type(loaded) is Mixtral and loaded.config == config
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]
    assert all(np.array_equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "config.json: top-k 5 is more than experts 4"),
        ({"num_local_experts": 10**9}, "no tensor of expert 4; it has 4 experts, config.json 1000000000"),
        ({"num_local_experts": 3}, "unexpected .*experts.3.w1.weight"),
        ({"num_local_experts": 8.0}, "num_local_experts is 8.0, expected an integer"),
        ({"num_local_experts": 0}, "num_local_experts = 0, expected at least 1"),
    ],
)
def test_a_bad_directory_is_refused_by_name(changes, message, tmp_path):
    save_pretrained(Mixtral(SMALL), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError, match=message):
        load_pretrained(tmp_path)


# ---- orders, of so many that a sort which is not stable would change them --------------------------------------------

MANY = RANDOM.integers(0, 3, (300, 2))


def test_rows_are_sorted_by_expert_and_then_by_token():
    rows = rows_by_expert(MANY, 4)
    expected = [token for expert in range(4) for token, chosen in enumerate(MANY) for each in chosen if each == expert]
    assert rows.tokens.tolist() == expected and rows.counts.tolist() == [*np.bincount(MANY.reshape(-1)), 0]
    assert (rows.tokens[rows.row_of] == np.arange(300)[:, None]).all() and (rows.is_kept == 1).all()
    assert sorted(rows.row_of.reshape(-1)) == list(range(600))


def test_a_capacity_takes_first_choices_in_the_order_of_tokens():
    rows = rows_within_capacity(MANY, 4, 70)
    kept = []
    for expert in range(4):
        wanted = [(token, slot) for slot in (0, 1) for token in range(300) if MANY[token, slot] == expert]
        kept += wanted[:70]
        own = [token for token, _ in wanted[:70]]
        assert rows.tokens[expert * 70 : (expert + 1) * 70].tolist() == own + [0] * (70 - len(own))
    assert sorted(map(tuple, np.argwhere(rows.is_kept == 1))) == sorted(kept)
    assert rows.counts.tolist() == [70] * 4


def test_of_many_equally_probable_experts_the_first_are_chosen():
    layer = layer_of(experts=64, top_k=3, router=0)
    indices, weights = layer.route(Tensor(RANDOM.standard_normal((5, 8))))
    assert indices.tolist() == [[0, 1, 2]] * 5
    np.testing.assert_allclose(weights.data, 1 / 3, rtol=1e-6)
