"""Claims about GPT: initial sizes, its tied head, the state that it takes, and its parts."""

from dataclasses import replace

import numpy as np
import pytest

from minipar.nn import GPT, GPTConfig
from minipar.train.pretrained import load_pretrained, save_pretrained

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])
TARGETS = np.array([[2, 3, 4, 5, 6], [0, 10, 0, 5, -100]])


def test_residual_projections_start_smaller():
    config = GPTConfig(vocab_size=11, n_positions=6, n_embd=128, n_layer=8, n_head=2)
    state = GPT(config, dtype="float64").state_dict()
    assert state["h.3.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.02)
    for name in ("h.3.mlp.c_proj.weight", "h.0.attn.c_proj.weight"):
        assert state[name].std() == pytest.approx(0.02 / 4, rel=0.02)


def test_tied_gradients_stay_apart_until_they_are_folded_once():
    model = GPT(SMALL, dtype="float64")
    model.loss(TOKENS, TARGETS).backward()
    weight, head = model.wte.weight, model.head_weight
    unseen = [v for v in range(11) if v not in TOKENS]
    assert not weight.grad[unseen].any() and head.grad[unseen].all()
    total = weight.grad + head.grad
    weight.fold_tied_gradients()
    weight.fold_tied_gradients()
    assert np.array_equal(weight.grad, total)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="6 .*wpe.* 5"):
        GPT(SMALL)(np.zeros((1, 7), int))


def test_state_dict_is_a_copy_and_loading_names_a_problem():
    model = GPT(SMALL)
    state = model.state_dict()
    model.wte.weight.data += 1
    assert not np.array_equal(model.wte.weight.data, state["wte.weight"])
    missing = {name: array for name, array in state.items() if name != "ln_f.bias"}
    turned = state | {"wpe.weight": state["wpe.weight"].T}
    for wrong, words in ((missing, "ln_f.bias.*None"), (turned, r"wpe.weight.*\(8, 6\).*\(6, 8\)")):
        with pytest.raises(ValueError, match=words):
            model.load_state_dict(wrong)


def test_a_refused_state_changes_no_parameter():
    model, other = GPT(SMALL), GPT(SMALL, seed=1).state_dict()
    before = model.state_dict()
    for wrong in ({"more": np.ones(1)}, {"ln_f.bias": np.ones(1)}):
        with pytest.raises(ValueError, match="more|ln_f.bias"):
            model.load_state_dict(other | wrong)
    assert all(np.array_equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_parts_of_a_gpt_run_in_order_are_the_gpt():
    model = GPT(SMALL)
    x = TOKENS
    for segment in model.segments:
        x = segment.run(x)
    assert np.array_equal(x.data, model(TOKENS).data)
    assert {p for segment in model.segments for p in segment.parameters} == set(model.parameters())
    assert model.wte.weight in model.segments[0].parameters and model.wte.weight in model.segments[-1].parameters


@pytest.mark.parametrize("kind", ["made", "loaded"])
def test_every_layer_norm_has_the_configurations_epsilon(kind, tmp_path):
    epsilon = 0.5  # as large as the variance, so that it changes the first digit
    model = GPT(replace(SMALL, layer_norm_epsilon=epsilon), dtype="float64")
    if kind == "loaded":
        save_pretrained(model, tmp_path)
        model = load_pretrained(tmp_path, dtype="float64")
    x = np.random.Generator(np.random.Philox(4)).standard_normal((5, 8))
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + epsilon)
    for layer in [model.ln_f, *[block.ln_1 for block in model.h], *[block.ln_2 for block in model.h]]:
        np.testing.assert_allclose(layer(x).data, expected, rtol=1e-12)
