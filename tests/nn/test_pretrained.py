"""Claims about the limits of a model directory: the last value that is taken, and the first that is refused."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
from safetensors import safe_open

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig, Mixtral, MixtralConfig
from minipar.nn.pretrained import check_header, load_config, load_pretrained, save_pretrained

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)


@pytest.fixture
def directory(tmp_path):
    save_pretrained(GPT(SMALL), tmp_path)
    return tmp_path


def change(directory, **settings):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("name", ["layer_norm_epsilon", "initializer_range"])
@pytest.mark.parametrize("value", [0, 0.0, 1, sys.float_info.max, int(sys.float_info.max)])
def test_any_finite_number_from_0_on_is_taken(directory, name, value):
    change(directory, **{name: value})
    assert getattr(load_config(directory), name) == value


def test_the_largest_size_is_that_of_31_bits(directory):
    change(directory, n_positions=2**31 - 1)
    assert load_config(directory).n_positions == 2**31 - 1
    change(directory, n_positions=2**31)
    with pytest.raises(UsageError, match="n_positions is 2147483648, expected at most 2147483647$"):
        load_config(directory)


def test_a_config_has_at_most_16_mib(directory):
    path = directory / "config.json"
    text = path.read_text()
    path.write_text(text + " " * (2**24 - len(text)))
    assert load_config(directory) == SMALL
    path.write_text(text + " " * (2**24 - len(text) + 1))
    with pytest.raises(UsageError, match="config.json: 16,777,217 bytes, expected at most 16 MiB$"):
        load_config(directory)


def test_a_header_has_at_most_16_mib(directory):
    path = directory / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for size in (2**24, 2**24 + 8):
        header = data[8 : 8 + length].ljust(size)
        path.write_bytes(size.to_bytes(8, "little") + header + data[8 + length :])
        if size == 2**24:
            check_header(path)
    with pytest.raises(UsageError, match=r"its header takes 16,777,224 bytes, expected at most 16,777,216$"):
        load_pretrained(directory)


def test_a_header_as_long_as_its_file_is_left_to_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**24 + 8).to_bytes(8, "little"))
    for size in (2**24 + 8, 2**24 + 9):
        os.truncate(path, size)
        if size == 2**24 + 8:
            check_header(path)
    with pytest.raises(UsageError, match="its header takes 16,777,224 bytes"):
        check_header(path)


def test_a_config_is_written_as_transformers_writes_it(directory):
    """By name, with an indent of 2, so that two files can be compared line by line."""
    text = (directory / "config.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("setting", ["n_inner", "model_type", "rope_parameters", "scale_attn_weights"])
def test_a_setting_that_is_not_there_has_its_usual_value(directory, setting):
    path = directory / "config.json"
    content = json.loads(path.read_text())
    content.pop(setting, None)
    path.write_text(json.dumps(content))
    assert load_config(directory) == SMALL


@pytest.mark.parametrize("sizes", [{"n_inner": 32}, {"n_inner": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_setting_with_its_usual_value_is_taken(directory, sizes):
    change(directory, **sizes)
    assert load_config(directory) == SMALL


@pytest.mark.parametrize("rope", [{"rope_type": "linear"}, {}, {"rope_type": "default", "factor": 2}, [], None])
def test_other_rotations_are_refused(directory, rope):
    change(directory, rope_parameters=rope)
    with pytest.raises(UsageError, match=r"rope_parameters is .*, but minipar's gpt2 has a rope_theta of rope_type"):
        load_config(directory)


@pytest.mark.parametrize("theta", [500.0, 7])
def test_a_theta_is_read_where_transformers_5_writes_it(theta, tmp_path):
    """Version 5 writes it in `rope_parameters`; files of version 4 have `rope_theta` alone."""
    save_pretrained(Llama(LLAMA), tmp_path)
    change(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert load_config(tmp_path) == replace(LLAMA, rope_theta=theta)
    change(tmp_path, rope_parameters={"rope_type": "default"}, rope_theta=theta + 1)
    assert load_config(tmp_path) == replace(LLAMA, rope_theta=theta + 1)


@pytest.mark.parametrize("head_dim", [4, None])
def test_a_head_has_its_share_of_the_hidden_size(head_dim, tmp_path):
    save_pretrained(Llama(LLAMA), tmp_path)
    change(tmp_path, head_dim=head_dim)
    assert load_config(tmp_path) == LLAMA
    change(tmp_path, head_dim=8)
    with pytest.raises(UsageError, match="config.json: head_dim is 8, expected 4$"):
        load_config(tmp_path)


def test_a_directory_may_be_given_as_a_text(tmp_path):
    save_pretrained(GPT(SMALL), f"{tmp_path}/new")
    assert load_config(f"{tmp_path}/new") == load_pretrained(f"{tmp_path}/new").config == SMALL


def test_saving_makes_the_directories_that_are_missing(tmp_path):
    for _ in range(2):  # the second time it is there
        save_pretrained(GPT(SMALL), tmp_path / "a" / "b")
    assert load_config(tmp_path / "a" / "b") == SMALL
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/c is not a directory with a config.json")):
        load_config(tmp_path / "c")


# ---- what the files say ----------------------------------------------------------------------------------------------

LLAMA = LlamaConfig(11, 8, 8, 2, 2)
MIXTRAL = MixtralConfig(11, 8, 8, 2, 2, 2)
WRITTEN = {  # transformers builds another function of other values
    GPT: (
        SMALL,
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
            "n_inner": None,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    Llama: (
        LLAMA,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
        },
    ),
    Mixtral: (
        MIXTRAL,
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "router_jitter_noise": 0.0,
            "sliding_window": None,
            "rope_scaling": None,
        },
    ),
}


@pytest.mark.parametrize("make", WRITTEN)
def test_the_files_say_what_transformers_has_to_know(make, tmp_path):
    config, settings = WRITTEN[make]
    save_pretrained(make(config), tmp_path)
    ids = {"bos_token_id": None, "eos_token_id": None}
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict() | settings | ids
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("make", WRITTEN)
def test_another_value_of_these_settings_is_refused(make, tmp_path):
    config, settings = WRITTEN[make]
    for name in set(settings) - {"architectures", "model_type", "n_inner", "embd_pdrop", "attn_pdrop", "resid_pdrop"}:
        save_pretrained(make(config), tmp_path)
        change(tmp_path, **{name: "another"})
        with pytest.raises(UsageError, match=f"{name} is 'another'"):
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
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED)
def test_a_configs_defaults_are_those_of_the_published_model(config):
    assert config().to_dict() == PUBLISHED[config]
