"""Claims about GPT, Llama and Mixtral alike: Hugging Face's names, published sizes, and every gradient."""

from dataclasses import replace

import numpy as np
import pytest

from minipar.autograd import Tensor, flop_counter
from minipar.autograd.gradcheck import gradcheck
from minipar.more.experts.mixtral import MixtralConfig
from minipar.more.llama import Block, Llama, LlamaConfig
from minipar.nn import GPTConfig

GPT2 = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
LLAMA = LlamaConfig(11, 8, 12, 2, 4, 2, 6)
MIXTRAL = MixtralConfig(11, 8, 12, 2, 4, 2, 6, num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama, tied": replace(LLAMA, tie_word_embeddings=True),
    "mixtral": MIXTRAL,
    "mixtral, tied": replace(MIXTRAL, tie_word_embeddings=True),
    "mixtral, all experts": replace(MIXTRAL, num_experts_per_tok=4),
}
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])
TARGETS = np.array([[2, 3, 4, 5, 6], [0, 10, 0, 5, -100]])
RANDOM = np.random.Generator(np.random.Philox(3))

# ---- names and shapes ------------------------------------------------------------------------------------------------

GPT2_BLOCK = {
    "ln_1.weight": (8,), "ln_1.bias": (8,), "attn.c_attn.weight": (8, 24), "attn.c_attn.bias": (24,),
    "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,), "ln_2.weight": (8,), "ln_2.bias": (8,),
    "mlp.c_fc.weight": (8, 32), "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (32, 8), "mlp.c_proj.bias": (8,),
}  # fmt: skip
ATTENTION = {
    "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8), "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
}  # fmt: skip
MLP = {"mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8), "mlp.down_proj.weight": (8, 12)}
EXPERTS = {"block_sparse_moe.gate.weight": (4, 8)}
for expert in range(4):
    for part, sizes in {"w1": (12, 8), "w2": (8, 12), "w3": (12, 8)}.items():
        EXPERTS[f"block_sparse_moe.experts.{expert}.{part}.weight"] = sizes
NORMS = {"input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,)}


def names_of(kind):
    """Each parameter's shape by its name in Hugging Face's files, in their order."""
    if kind == "gpt2":
        expected = {"wte.weight": (11, 8), "wpe.weight": (6, 8)}
        expected |= {f"h.{i}.{name}": shape for i in range(2) for name, shape in GPT2_BLOCK.items()}
        return expected | {"ln_f.weight": (8,), "ln_f.bias": (8,)}
    block = ATTENTION | (MLP if "llama" in kind else EXPERTS) | NORMS
    expected = {"model.embed_tokens.weight": (11, 8)}
    expected |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    expected |= {"model.norm.weight": (8,)}
    return expected if "tied" in kind else expected | {"lm_head.weight": (11, 8)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_and_shapes_are_hugging_faces(kind):
    shapes = {name: p.shape for name, p in CONFIGS[kind].build().named_parameters()}
    assert shapes == names_of(kind) and list(shapes) == list(names_of(kind))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_published_models_have_the_published_parameters():
    """As `transformers` counts them."""
    counts = {GPTConfig: 124_439_808, LlamaConfig: 6_738_415_616, MixtralConfig: 46_702_792_704}
    for config, count in counts.items():
        assert sum(p.size for p in config().build(seed=None).parameters()) == count


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_counts_its_models_products(kind):
    config = CONFIGS[kind]
    model = config.build(dtype="float64")
    forward = 2 * 5 * sum(config.segment_flops(5))
    flops = []
    with flop_counter(flops.append):
        loss = model.loss_sum(TOKENS, TARGETS)
        assert sum(flops) == forward
        loss.backward()
    assert sum(flops) == 3 * forward


@pytest.mark.parametrize(
    ("config", "sizes", "named"),
    [
        (LLAMA, {"hidden_size": 9}, "9 .*4"),
        (LLAMA, {"num_key_value_heads": 3}, "4 .*3"),
        (LLAMA, {"hidden_size": 12}, "12/4"),  # rotary positions rotate pairs
        (MIXTRAL, {"num_experts_per_tok": 5}, "5 .*4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config, sizes, named):
    with pytest.raises(ValueError, match=named):
        replace(config, **sizes)


def test_without_kv_heads_each_head_has_its_own():
    assert replace(LLAMA, num_key_value_heads=None).num_key_value_heads == 4


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_matrix_starts_from_values_of_its_own(kind):
    state = CONFIGS[kind].build(dtype="float64").state_dict()
    drawn = [array.reshape(-1)[:20].tobytes() for array in state.values() if array.ndim == 2]
    assert len(set(drawn)) == len(drawn)
    single = CONFIGS[kind].build(dtype="float32").state_dict()
    assert all(np.array_equal(single[name], x.astype(np.float32)) for name, x in state.items())
    other = CONFIGS[kind].build(dtype="float64", seed=1).state_dict()
    for name, x in state.items():
        assert np.array_equal(other[name], x) == (x.ndim == 1)
        assert x.ndim == 2 or (x == (0 if name.endswith("bias") else 1)).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama, tied", "mixtral", "mixtral, tied"])
def test_the_gradient_of_the_whole_model_passes_the_checker(kind):
    model = CONFIGS[kind].build(dtype="float64")
    modules = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters()]
    # Larger weights than the initial ones, so that no branch's gradient is lost in the others'.
    values = [RANDOM.standard_normal(p.shape) * 0.5 for p in model.parameters()]

    def loss(*leaves):
        for name, leaf in zip(names, leaves, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(modules[owner], last, leaf)
        if "lm_head.weight" not in names:
            model.head_weight = leaves[0]  # one leaf in both places: its gradient must hold both uses
        return model.loss(TOKENS, TARGETS)

    gradcheck(loss, values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama, tied", "mixtral"])
def test_recompute_gives_the_same_bits(kind, dtype):
    results = []
    for recompute in (False, True):
        model = CONFIGS[kind].build(dtype=dtype, recompute=recompute)
        loss = model.loss(TOKENS, TARGETS)
        loss.backward()
        for p in model.parameters():
            p.fold_tied_gradients()
        results.append([loss.item(), *(p.grad.tobytes() for p in model.parameters())])
    assert results[0] == results[1]


def test_a_llama_block_is_its_formula_written_out():
    """In NumPy, query by query, with another frequency and epsilon than the defaults; two queries share a key."""
    config = LlamaConfig(11, 16, 12, 1, 4, 2, 6, rope_theta=50.0, rms_norm_eps=0.3)
    block = Block(Llama(config, dtype="float64"), "model.layers.0")
    for parameter in block.parameters():
        parameter.data[...] = RANDOM.standard_normal(parameter.shape)
    weight = {name.removesuffix(".weight"): p.data for name, p in block.named_parameters()}
    sample = RANDOM.standard_normal((5, 16))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.3) * weight[name]

    def turned(head, position):
        """Rotate elements 0 and 2 of a head, and 1 and 3."""
        angle = position * np.array([1.0, 50.0**-0.5])
        return np.concatenate([
            head[:2] * np.cos(angle) - head[2:] * np.sin(angle),
            head[2:] * np.cos(angle) + head[:2] * np.sin(angle),
        ])  # fmt: skip

    normed = norm(sample, "input_layernorm")
    q, k, v = (normed @ weight[f"self_attn.{name}_proj"].T for name in "qkv")
    attended = np.zeros((5, 16))
    for t in range(5):
        for h in range(4):
            own, shared = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
            query = turned(q[t, own], t)
            powers = np.exp([query @ turned(k[s, shared], s) / 2 for s in range(t + 1)])
            attended[t, own] = powers / powers.sum() @ v[: t + 1, shared]
    y = sample + attended @ weight["self_attn.o_proj"].T
    normed = norm(y, "post_attention_layernorm")
    gate, up = (normed @ weight[f"mlp.{name}_proj"].T for name in ("gate", "up"))
    expected = y + (gate / (1 + np.exp(-gate)) * up) @ weight["mlp.down_proj"].T
    np.testing.assert_allclose(block(Tensor(sample[None])).data[0], expected, rtol=1e-11)
