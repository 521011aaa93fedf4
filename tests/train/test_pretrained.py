"""Claims about model directories: they come back as they were, say what transformers reads, and are refused if bad."""

import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from minipar.errors import UsageError
from minipar.more.experts.mixtral import MixtralConfig
from minipar.more.llama import Llama, LlamaConfig
from minipar.nn import GPT, GPTConfig
from minipar.train.pretrained import load_config, load_pretrained, save_pretrained

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
LLAMA = LlamaConfig(11, 8, 12, 2, 4, 2, 6)
MIXTRAL = MixtralConfig(11, 8, 12, 2, 4, 2, 6, num_local_experts=4, num_experts_per_tok=2)
CONFIGS = {"gpt2": SMALL, "llama": LLAMA, "mixtral": MIXTRAL}
TIED = {f"{name}, tied": replace(CONFIGS[name], tie_word_embeddings=True) for name in ("llama", "mixtral")}
WEIGHTS = "model.safetensors"


def made(kind, directory):
    """Write a model of this kind; return the directory."""
    save_pretrained(CONFIGS[kind].build(), directory)
    return directory


@pytest.fixture
def directory(tmp_path):
    return made("gpt2", tmp_path)


def edit(directory, **changes):
    """Change settings of config.json; those with the value `delete` go."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "delete"}))


def edit_tensors(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / WEIGHTS)


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", (CONFIGS | TIED).values(), ids=CONFIGS | TIED)
def test_export_and_load_return_the_same_model(config, tmp_path):
    model = config.build(dtype="float64")
    state = model.state_dict()
    directory = tmp_path / "made" / "here"
    for _ in range(2):  # the second time it is there
        save_pretrained(model, str(directory))
    loaded = load_pretrained(str(directory), dtype="float64")
    assert type(loaded) is type(model) and loaded.config == load_config(directory) == config
    assert list(loaded.state_dict()) == list(state)
    assert all(np.array_equal(x, state[name]) for name, x in loaded.state_dict().items())
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", WEIGHTS]


def test_export_writes_the_given_state_instead_of_the_models(tmp_path):
    state = {name: x + 1 for name, x in GPT(SMALL).state_dict().items()}
    save_pretrained(GPT(SMALL), tmp_path, state)
    assert all(np.array_equal(x, state[name]) for name, x in load_pretrained(tmp_path).state_dict().items())


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_export_names_the_dropout_of_training(dropout, tmp_path):
    save_pretrained(GPT(SMALL, dropout=dropout), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [config[f"{place}_pdrop"] for place in ("embd", "attn", "resid")] == [dropout] * 3


def test_files_with_prefix_head_and_masks_load(directory):
    state = load_pretrained(directory).state_dict()
    written = {f"transformer.{name}": x for name, x in state.items()}
    written["lm_head.weight"] = state["wte.weight"].copy()
    written["transformer.h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.float32)
    save_file(written, directory / WEIGHTS)
    assert all(np.array_equal(x, state[name]) for name, x in load_pretrained(directory).state_dict().items())


def test_a_tied_file_may_hold_its_head_and_old_buffers(tmp_path):
    model = Llama(TIED["llama, tied"])
    save_pretrained(model, tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].copy(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32),
            }
        ),
    )
    state = load_pretrained(tmp_path).state_dict()
    assert all(np.array_equal(x, state[name]) for name, x in model.state_dict().items())


# ---- what the files say ----------------------------------------------------------------------------------------------

WRITTEN = {  # besides sizes; transformers assumes a dropout of 0.1
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"]},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_files_say_what_transformers_has_to_know(kind, tmp_path):
    made(kind, tmp_path)
    written = vars(CONFIGS[kind]) | WRITTEN[kind]
    written |= {"model_type": kind, "bos_token_id": None, "eos_token_id": None}
    assert json.loads((tmp_path / "config.json").read_text()) == written
    with safe_open(tmp_path / WEIGHTS, "np") as file:
        assert file.metadata() == {"format": "pt"}, "transformers reads no other"


OTHER_FUNCTIONS = {  # transformers builds another function of other values
    "gpt2": ("activation_function",),
    "llama": ("hidden_act", "rope_scaling"),
    "mixtral": ("hidden_act", "sliding_window", "rope_scaling"),
}


@pytest.mark.parametrize("kind", OTHER_FUNCTIONS)
def test_another_value_of_these_settings_is_refused(kind, tmp_path):
    for name in OTHER_FUNCTIONS[kind]:
        edit(made(kind, tmp_path), **{name: "another"})
        with pytest.raises(UsageError, match=f"config.json: {name} .*'another'"):
            load_config(tmp_path)


# Of Hugging Face's openai-community/gpt2, huggyllama/llama-7b and mistralai/Mixtral-8x7B-v0.1.
PUBLISHED = {
    GPTConfig: {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    },
    LlamaConfig: {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "initializer_range": 0.02, "tie_word_embeddings": False,
    },
    MixtralConfig: {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "initializer_range": 0.02, "tie_word_embeddings": False,
        "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False,
        "router_aux_loss_coef": 0.001,  # transformers' default
    },
}  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED)
def test_a_configs_defaults_are_those_of_the_published_model(config):
    assert vars(config()) == PUBLISHED[config]


@pytest.mark.parametrize("setting", ["n_inner", "model_type", "rope_parameters", "scale_attn_weights"])
def test_a_setting_that_is_not_there_has_its_usual_value(directory, setting):
    edit(directory, **{setting: "delete"})
    assert load_config(directory) == SMALL


@pytest.mark.parametrize("value", [0, 0.0, 1, sys.float_info.max, int(sys.float_info.max)])
def test_any_finite_number_from_0_on_is_taken(directory, value):
    edit(directory, layer_norm_epsilon=value, n_inner=32)
    assert load_config(directory).layer_norm_epsilon == value


@pytest.mark.parametrize("theta", [500.0, 7])
def test_a_theta_is_read_where_transformers_5_writes_it(theta, tmp_path):
    """Version 5 writes it in `rope_parameters`; files of version 4 have `rope_theta` alone."""
    made("llama", tmp_path)
    edit(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert load_config(tmp_path) == replace(LLAMA, rope_theta=theta)
    edit(tmp_path, rope_parameters={"rope_type": "default"}, rope_theta=theta + 1)
    assert load_config(tmp_path) == replace(LLAMA, rope_theta=theta + 1)


def rewrite_as(path, key, dtype, itemsize, content=None):
    """Write a safetensors file again by hand, with bytes of `dtype`, or zeros, for one tensor; NumPy may lack it."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    body, table = b"", {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        piece, kind = data[start:stop], entry["dtype"]
        if name == key:
            piece, kind = content or bytes(int(np.prod(entry["shape"])) * itemsize), dtype
        table[name] = {"dtype": kind, "shape": entry["shape"], "data_offsets": [len(body), len(body) + len(piece)]}
        body += piece
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_files_of_two_byte_values_load_exactly(tmp_path):
    model = GPT(SMALL)
    save_pretrained(model, tmp_path)
    halves = {name: x.astype(np.float16) for name, x in model.state_dict().items()}
    save_file(halves, tmp_path / "model.safetensors")
    for name, parameter in load_pretrained(tmp_path).named_parameters():
        assert parameter.dtype == np.float32 and np.array_equal(parameter.data, halves[name])
    save_pretrained(model, tmp_path)
    bits = {name: x.view(np.uint32) >> 16 for name, x in model.state_dict().items()}
    for name, x in bits.items():
        rewrite_as(tmp_path / "model.safetensors", name, "BF16", 2, x.astype("<u2").tobytes())
    for name, parameter in load_pretrained(tmp_path, dtype="float64").named_parameters():
        assert parameter.dtype == np.float64 and np.array_equal(parameter.data, (bits[name] << 16).view(np.float32))


# ---- bad directories -------------------------------------------------------------------------------------------------


def cut_off(directory):
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:-8])


def settings(**changes):
    return lambda directory: edit(directory, **changes)


def tensors(change):
    return lambda directory: edit_tensors(directory, change)


BAD_GPTS = {  # what is done to the directory, and what the message has to name
    "no config": ((lambda d: (d / "config.json").unlink()), "config.json"),
    "no directory": (shutil.rmtree, "config.json"),
    "no weights": ((lambda d: (d / WEIGHTS).unlink()), WEIGHTS),
    "not JSON": ((lambda d: (d / "config.json").write_text("{")), "config.json"),
    "weights cut off": (cut_off, WEIGHTS),
    "only a header's length": ((lambda d: (d / WEIGHTS).write_bytes((2**30).to_bytes(8, "little"))), WEIGHTS),
    "a layer missing": (settings(n_layer=3), "h.2.ln_1.weight"),
    "heads that do not divide": (settings(n_head=3), "config.json: .*8 .*3"),
    "another model": (settings(model_type="bert"), "config.json: model_type .*'bert'"),
    "another rotation": (settings(rope_parameters={"rope_type": "linear"}), "config.json: rope_type .*'linear'"),
    "a tensor missing": (tensors(lambda t: t.pop("ln_f.bias")), "ln_f.bias"),
    "a tensor misshapen": (
        tensors(lambda t: t.update({"wte.weight": t["wte.weight"][:5]})),
        r"wte.weight .*\(5, 8\).*\(11, 8\)",
    ),
}
BAD_LLAMAS = {
    "kv-heads that do not divide": (settings(num_key_value_heads=3), "config.json: .*4 .*3"),
    "other kv-heads": (settings(num_key_value_heads=None), r"k_proj.weight .*\(4, 8\).*\(8, 8\)"),
    "no head": (tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight"),
}
BAD_MIXTRALS = {
    "a choice of more than all": (settings(num_experts_per_tok=5), "config.json: .*5 .*4"),
    "one expert less": (settings(num_local_experts=3), r"gate.weight .*\(4, 8\).*\(3, 8\)"),
    "no experts": (settings(num_local_experts=0), "config.json: .*2 .*0"),
}
BAD = [("gpt2", *row) for row in BAD_GPTS.values()] + [("llama", *row) for row in BAD_LLAMAS.values()]
BAD += [("mixtral", *row) for row in BAD_MIXTRALS.values()]


@pytest.mark.parametrize(("kind", "spoil", "named"), BAD, ids=[*BAD_GPTS, *BAD_LLAMAS, *BAD_MIXTRALS])
def test_a_bad_directory_is_refused_in_one_line_by_name(kind, spoil, named, tmp_path):
    spoil(made(kind, tmp_path))
    with pytest.raises(UsageError) as error:
        load_pretrained(tmp_path)
    text = str(error.value).replace(str(tmp_path), "")
    assert re.search(named, text) and "\n" not in text
