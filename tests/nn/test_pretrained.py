"""Claims about the limits of a model directory: the last value that is taken, and the first that is refused."""

import json
import re
import sys

import pytest

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
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


def test_saving_makes_the_directories_that_are_missing(tmp_path):
    for _ in range(2):  # the second time it is there
        save_pretrained(GPT(SMALL), tmp_path / "a" / "b")
    assert load_config(tmp_path / "a" / "b") == SMALL
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/c is not a directory with a config.json")):
        load_config(tmp_path / "c")
