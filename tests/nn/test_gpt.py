"""Claims about the model: GPT-2's names and shapes, its gradients, its files."""

import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from minipar.autograd.gradcheck import gradcheck
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import load_pretrained, save_pretrained
from minipar.nn.transformer import LanguageModel

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])
TARGETS = np.array([[2, 3, 4, 5, 6], [0, 10, 0, 5, -100]])


def gradients(model, **kwargs):
    model.zero_grad()
    loss = model.loss(TOKENS, TARGETS, **kwargs)
    loss.backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_names_and_shapes_are_hugging_faces():
    shapes = {name: p.shape for name, p in GPT(SMALL).named_parameters()}
    block = {
        "ln_1.weight": (8,), "ln_1.bias": (8,),
        "attn.c_attn.weight": (8, 24), "attn.c_attn.bias": (24,),
        "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,),
        "ln_2.weight": (8,), "ln_2.bias": (8,),
        "mlp.c_fc.weight": (8, 32), "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (32, 8), "mlp.c_proj.bias": (8,),
    }  # fmt: skip
    expected = {"wte.weight": (11, 8), "wpe.weight": (6, 8)}
    expected |= {f"h.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    expected |= {"ln_f.weight": (8,), "ln_f.bias": (8,)}
    assert shapes == expected and list(shapes) == list(expected)


def test_gpt2_small_has_the_published_number_of_parameters():
    """124,439,808, as `transformers` counts them; summed from one layer, so that no large model need be made."""
    h, layers = 768, 12
    one = sum(
        p.size for name, p in GPT(GPTConfig(n_layer=1), dtype="float32").named_parameters() if name.startswith("h.")
    )
    assert one == 12 * h * h + 13 * h
    assert 50257 * h + 1024 * h + layers * one + 2 * h == 124_439_808


def test_every_parameter_starts_from_values_of_its_own():
    state = GPT(SMALL, dtype="float64").state_dict()
    random = [x for name, x in state.items() if x.ndim == 2]
    for i, a in enumerate(random):
        for b in random[:i]:
            n = min(a.size, b.size)
            assert not np.array_equal(a.reshape(-1)[:n], b.reshape(-1)[:n])
    single = GPT(SMALL, dtype="float32").state_dict()
    assert all(np.array_equal(single[name], x.astype(np.float32)) for name, x in state.items())
    other = GPT(SMALL, dtype="float64", seed=1).state_dict()
    assert not np.array_equal(other["wte.weight"], state["wte.weight"])


def test_residual_projections_start_smaller():
    config = GPTConfig(vocab_size=11, n_positions=6, n_embd=128, n_layer=8, n_head=2)
    state = GPT(config, dtype="float64").state_dict()
    assert state["h.3.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.02)
    for name in ("h.3.mlp.c_proj.weight", "h.0.attn.c_proj.weight"):
        assert state[name].std() == pytest.approx(0.02 / 4, rel=0.02)


def test_a_model_of_ones_own_says_what_it_has_to_define():
    class Own(LanguageModel):
        config_type = GPTConfig
        initializer_range = 0.02

    own = Own(GPTConfig(8, 4, 4, 1, 1), seed=0, dtype="float32", recompute=False, deferred=True, attention="full")
    with pytest.raises(TypeError, match="Own does not define token_embedding"):
        own.token_embedding  # noqa: B018
    with pytest.raises(TypeError, match="Own does not define embed"):
        own.embed(np.zeros((1, 2), dtype=int))


def test_the_gradient_of_the_whole_model_passes_the_checker():
    model = GPT(SMALL, dtype="float64")
    named = dict(model.named_parameters())
    # Larger weights than the initial ones, so that no branch's gradient is lost in the others'.
    random = np.random.Generator(np.random.Philox(3))
    values = [random.standard_normal(p.shape) * 0.5 for p in named.values()]

    def loss(*leaves):
        for (name, parameter), leaf in zip(named.items(), leaves, strict=True):
            owner = model
            *path, last = name.split(".")
            for part in path:
                owner = owner[int(part)] if isinstance(owner, list) else getattr(owner, part)
            setattr(owner, last, leaf)
            del parameter
        model.head_weight = leaves[0]  # one leaf in both places: its gradient must hold both uses
        return model.loss(TOKENS, TARGETS)

    gradcheck(loss, values)


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_recompute_gives_the_same_bits(dtype):
    loss, expected = gradients(GPT(SMALL, dtype=dtype))
    again, actual = gradients(GPT(SMALL, dtype=dtype, recompute=True))
    assert loss == again
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="sequence of 7 tokens, but the model has 6 positions"):
        GPT(SMALL)(np.zeros((1, 7), int))


def test_hidden_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="hidden 64 is not divisible by heads 5"):
        GPTConfig(n_embd=64, n_head=5)


def test_state_dict_is_a_copy_and_loading_names_every_problem():
    model = GPT(SMALL)
    state = model.state_dict()
    model.wte.weight.data += 1
    assert not np.array_equal(model.wte.weight.data, state["wte.weight"])
    del state["ln_f.bias"]
    state["wpe.weight"] = state["wpe.weight"].T
    state["h.9.ln_1.weight"] = np.ones(8)
    with pytest.raises(ValueError) as error:
        model.load_state_dict(state)
    for part in ("missing ln_f.bias", "unexpected h.9.ln_1.weight", "wpe.weight has shape (8, 6), expected (6, 8)"):
        assert part in str(error.value)


def test_a_refused_state_changes_no_parameter():
    model, other = GPT(SMALL), GPT(SMALL, seed=1).state_dict()
    before = model.state_dict()
    for wrong in ({"more": np.ones(1)}, {"ln_f.bias": np.ones(1)}):
        with pytest.raises(ValueError, match="unexpected more|ln_f.bias has shape"):
            model.load_state_dict(other | wrong)
    assert all(np.array_equal(x, before[name]) for name, x in model.state_dict().items())


def test_export_and_load_return_the_same_model(tmp_path):
    model = GPT(SMALL, dtype="float64")
    save_pretrained(model, tmp_path / "made" / "here")
    loaded = load_pretrained(tmp_path / "made" / "here", dtype="float64")
    assert loaded.config == SMALL
    assert all(np.array_equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    assert sorted(p.name for p in (tmp_path / "made" / "here").iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "made" / "here" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}, "transformers reads no other"


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_export_names_the_dropout_of_training(dropout, tmp_path):
    save_pretrained(GPT(SMALL, dropout=dropout), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [config[f"{place}_pdrop"] for place in ("embd", "attn", "resid")] == [dropout] * 3


def test_files_with_prefix_head_and_masks_load(tmp_path):
    model = GPT(SMALL)
    save_pretrained(model, tmp_path)
    state = {f"transformer.{name}": x for name, x in model.state_dict().items()}
    state["lm_head.weight"] = model.state_dict()["wte.weight"]
    state["transformer.h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.float32)
    save_file(state, tmp_path / "model.safetensors")
    assert np.array_equal(load_pretrained(tmp_path).wpe.weight.data, model.wpe.weight.data)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="lm_head.weight differs from wte.weight"):
        load_pretrained(tmp_path)


def _edit_config(directory, **changes):
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "delete"}))


def _replace(path, target):
    path.unlink()
    path.symlink_to(target)


def _edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors")


def _lengthen_header(path, spaces):
    """Add spaces to the header of a safetensors file, which stays valid."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length] + b" " * spaces
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_long_header_below_the_limit_is_read(tmp_path):
    save_pretrained(GPT(SMALL), tmp_path)
    _lengthen_header(tmp_path / "model.safetensors", 10_000)
    load_pretrained(tmp_path)


BAD_DIRECTORIES = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: No such file"),
    "no directory": (shutil.rmtree, r"is not a directory with a config.json.*downloads nothing"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "not JSON": (lambda d: (d / "config.json").write_text("{"), "is not JSON"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
    "a size missing": (lambda d: _edit_config(d, n_head="delete"), "n_head is 'missing'"),
    "a size of the wrong kind": (lambda d: _edit_config(d, n_layer="two"), "n_layer is 'two'"),
    "a size that is a bool": (lambda d: _edit_config(d, n_layer=True), "n_layer is True, expected an integer"),
    "a size of 400 digits": (
        lambda d: _edit_config(d, n_positions=10**399),
        r"n_positions is 1000+\.\.\.0+, expected at most 2147483647$",
    ),
    "sizes that no array has": (lambda d: _edit_config(d, n_embd=2**31 - 2, n_head=1), "config.json: .*too large"),
    "a billion layers": (lambda d: _edit_config(d, n_layer=10**9), "it has 2 layers, config.json 1000000000$"),
    "an epsilon that is text": (
        lambda d: _edit_config(d, layer_norm_epsilon="1e-5"),
        "layer_norm_epsilon is '1e-5', expected a finite number of at least 0$",
    ),
    "an epsilon without end": (lambda d: _edit_config(d, layer_norm_epsilon=float("inf")), "layer_norm_epsilon is inf"),
    "an epsilon that is no number": (lambda d: _edit_config(d, layer_norm_epsilon=float("nan")), "epsilon is nan"),
    "a range that is a list": (lambda d: _edit_config(d, initializer_range=[0.02]), r"initializer_range is \[0.02\]"),
    "a range of 400 digits": (lambda d: _edit_config(d, initializer_range=10**399), "initializer_range is 1000"),
    "a range below 0": (lambda d: _edit_config(d, initializer_range=-1), "initializer_range is -1"),
    "JSON nested deeply": (
        lambda d: (d / "config.json").write_text("[" * 10**6 + "]" * 10**6),
        "config.json: nested too deeply$",
    ),
    "a pipe as config": (
        lambda d: ((d / "config.json").unlink(), os.mkfifo(d / "config.json")),
        "config.json: not a regular file$",
    ),
    "a device as config": (lambda d: _replace(d / "config.json", "/dev/zero"), "config.json: not a regular file$"),
    "a directory as config": (lambda d: _replace(d / "config.json", d), "config.json: not a regular file$"),
    "a config of 100 GB": (
        lambda d: os.truncate(d / "config.json", 10**11),
        "config.json: 100,000,000,000 bytes, expected at most 16 MiB$",
    ),
    "a pipe as weights": (
        lambda d: ((d / "model.safetensors").unlink(), os.mkfifo(d / "model.safetensors")),
        "model.safetensors: not a regular file$",
    ),
    "a device as weights": (lambda d: _replace(d / "model.safetensors", "/dev/zero"), "safetensors: not a regular"),
    "a directory as weights": (lambda d: _replace(d / "model.safetensors", d), "safetensors: not a regular file$"),
    "weights of 100 GB": (lambda d: os.truncate(d / "model.safetensors", 10**11), "not a safetensors file that can be"),
    "a header of 20 MB": (
        lambda d: _lengthen_header(d / "model.safetensors", 20_000_000),
        r"model.safetensors: its header takes 20,\d\d\d,\d\d\d bytes, expected at most 16,777,216$",
    ),
    "a header longer than its file": (
        lambda d: (d / "model.safetensors").write_bytes((2**30).to_bytes(8, "little") + b"{}"),
        "model.safetensors is not a safetensors file that can be read",
    ),
    "heads that do not divide": (lambda d: _edit_config(d, n_head=3), "hidden 8 is not divisible by heads 3"),
    "another activation": (lambda d: _edit_config(d, activation_function="relu"), "activation_function is 'relu'"),
    "another model": (lambda d: _edit_config(d, model_type="bert"), "model_type is 'bert', expected gpt2 or llama"),
    "another inner size": (lambda d: _edit_config(d, n_inner=7), "n_inner is 7"),
    "a layer missing": (lambda d: _edit_config(d, n_layer=3), "no tensor of layer 2; it has 2 layers, config.json 3"),
    "a tensor missing": (lambda d: _edit_tensors(d, lambda t: t.pop("ln_f.bias")), "missing ln_f.bias"),
    "a tensor misshapen": (
        lambda d: _edit_tensors(d, lambda t: t.update({"wte.weight": t["wte.weight"][:5]})),
        r"wte.weight has shape \(5, 8\), expected \(11, 8\)",
    ),
    "a truncated file": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-8]),
        "is not a safetensors file that can be read",
    ),
}


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_a_bad_directory_is_refused_by_name(name, tmp_path):
    spoil, message = BAD_DIRECTORIES[name]
    save_pretrained(GPT(SMALL), tmp_path)
    spoil(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        load_pretrained(tmp_path)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_parts_say_what_backward_reads_and_which_is_last():
    segments = GPT(SMALL).segments
    assert [segment.reads_in_backward for segment in segments] == [False, True, True, True]
    assert [segment.is_last for segment in segments] == [False, False, False, True]


# ---- sizes that no machine has ---------------------------------------------------------------------------------------

# 12 h^2 + 13 h parameters in a layer, 2 h in the last LayerNorm, and the two embeddings.
TOO_LARGE = {
    "a vocabulary": ({"vocab_size": 10**12}, (10**12 + 6) * 8 + 2 * 872 + 16),
    "positions": ({"n_positions": 10**13}, (11 + 10**13) * 8 + 2 * 872 + 16),
    "layers": ({"n_layer": 10**9}, 17 * 8 + 10**9 * 872 + 16),
    "a hidden size": ({"n_embd": 2 * 10**6}, 17 * 2 * 10**6 + 2 * (48 * 10**12 + 26 * 10**6) + 4 * 10**6),
    "a size of 4,000 digits": ({"n_embd": 2 * 10**4000}, 96 * 10**8000),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_model_larger_than_memory_is_refused_with_its_bytes(name):
    sizes, parameters = TOO_LARGE[name]
    config = replace(SMALL, **sizes)
    tracemalloc.start()
    with pytest.raises(UsageError) as error:
        GPT(config, dtype="float64")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    needed = f"{Decimal(parameters):.6g} parameters * 8 bytes / 1 = {Decimal(8 * parameters):.6g} bytes, but this"
    assert needed in str(error.value) and peak < 10**6
    with pytest.raises(UsageError, match=r"\* 16 bytes / 3 = "):
        config.check_memory(16, shares=3)


def test_the_refused_parameters_are_those_of_the_model(monkeypatch):
    held = sum(p.size for p in GPT(SMALL).parameters())
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": held}.get)
    SMALL.check_memory(8)
    SMALL.check_memory(16, shares=2)
    with pytest.raises(UsageError, match=f" {Decimal(held):.6g} parameters "):
        SMALL.check_memory(9)
    GPT(SMALL, dtype="float64")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": held - 1}.get)
    with pytest.raises(UsageError, match="but this machine has"):
        GPT(SMALL, dtype="float64")
    GPT(SMALL, dtype="float64", deferred=True)  # its values may be spread over many machines


def test_loading_more_than_the_memory_is_refused(tmp_path, monkeypatch):
    save_pretrained(GPT(SMALL), tmp_path)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1000}.get)
    with pytest.raises(UsageError, match="parameters .* 4 bytes / 1 = .* bytes, but this machine has 1000"):
        load_pretrained(tmp_path)
    assert load_pretrained(tmp_path, deferred=True).config == SMALL
