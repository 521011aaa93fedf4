"""Against Hugging Face transformers' GPT2LMHeadModel, in float64: logits, loss, every gradient, and files both ways."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from minipar.generate import generate, load
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained

RANDOM = np.random.Generator(np.random.Philox(9))
SHAPES = [
    GPTConfig(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=3),
    GPTConfig(vocab_size=64, n_positions=9, n_embd=32, n_layer=3, n_head=1),
]


def theirs(config, seed=0):
    torch.manual_seed(seed)
    settings = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.n_positions,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.3,  # large, so that every branch matters in the tenth digit
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(settings).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains too: at 0 and 1 mistakes in them would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def data(config):
    tokens = RANDOM.integers(0, config.vocab_size, (3, config.n_positions))
    targets = RANDOM.integers(0, config.vocab_size, (3, config.n_positions))
    targets[1, 2:5] = -100
    return tokens, targets


def assert_same_function(model, reference, config):
    tokens, targets = data(config)
    logits = reference(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), torch.tensor(targets).reshape(-1))
    reference.zero_grad()
    loss.backward()
    np.testing.assert_allclose(model(tokens).data, logits.detach().numpy(), rtol=1e-10, atol=1e-10)
    ours = model.loss(tokens, targets)
    assert abs(ours.item() - loss.item()) <= 1e-10
    model.zero_grad()
    ours.backward()
    gradients = {name.removeprefix("transformer."): p.grad.numpy() for name, p in reference.named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(gradients)
    for name, parameter in model.named_parameters():
        parameter.fold_tied_gradients()
        np.testing.assert_allclose(parameter.grad, gradients[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", SHAPES)
def test_a_directory_saved_there_computes_the_same_here(config, recompute, tmp_path):
    reference = theirs(config)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype="float64", recompute=recompute)
    assert_same_function(model, reference, config)


@pytest.mark.parametrize("config", SHAPES)
def test_a_directory_exported_here_computes_the_same_there(config, tmp_path):
    model = GPT(config, seed=5, dtype="float64")
    for parameter in model.parameters():
        parameter.data += RANDOM.standard_normal(parameter.shape) * 0.1
    save_pretrained(model, tmp_path)
    reference, report = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}  # tied to wte there as here
    reference.config._attn_implementation = "eager"
    assert_same_function(model, reference.eval(), config)


def test_the_base_model_without_a_head_loads_too(tmp_path):
    config = SHAPES[0]
    reference = theirs(config)
    reference.transformer.save_pretrained(tmp_path)
    assert_same_function(load_pretrained(tmp_path, dtype="float64"), reference, config)


@pytest.mark.parametrize("config", SHAPES)
def test_greedy_text_is_that_of_generate_there(config, tmp_path):
    """As many tokens as the positions allow: there, a longer text is an error."""
    save_pretrained(GPT(replace(config, initializer_range=0.5), seed=5, dtype="float64"), tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    prompt = [3, 1, 4]
    count = config.n_positions - len(prompt)
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    theirs_text = reference.generate(torch.tensor([prompt]), **options)[0].tolist()
    ours = generate(load(str(tmp_path)), prompt, count, temperature=0.0, top_k=256, seed=0)
    assert ours == theirs_text and len(set(ours)) > 3
