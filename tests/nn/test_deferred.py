"""Claims about deferred values: a model is described first and filled piece by piece, from seeds or files."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Parameter, placeholder
from minipar.nn.pretrained import load_pretrained, save_pretrained

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])


def counted(shape=(2, 3), dtype="float32"):
    """Return a parameter of deferred values, and a list that gets an entry each time they are computed."""
    calls = []

    def make():
        calls.append(None)
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)

    return Parameter(placeholder(shape, dtype), make), calls


def test_a_placeholder_is_one_read_only_nan_of_any_shape():
    array = placeholder((1000, 1000), np.float32)
    assert array.shape == (1000, 1000) and array.dtype == np.float32
    assert array.base.nbytes == 4 and np.isnan(array).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_a_deferred_parameter_computes_its_values_once():
    parameter, calls = counted()
    assert (parameter.shape, parameter.dtype, parameter.size, parameter.ndim) == ((2, 3), np.float32, 6, 2)
    assert parameter.decays and not counted((6,))[0].decays
    assert np.isnan(parameter.data).all() and calls == []
    for _ in range(2):
        parameter.materialize()
        assert np.array_equal(parameter.data, [[0, 1, 2], [3, 4, 5]]) and len(calls) == 1


def test_moving_computes_or_copies_the_values_in_place():
    parameter, calls = counted()
    storage = np.full(12, -1, np.float32)
    first, second = (storage[i : i + 6].reshape(2, 3) for i in (0, 6))
    parameter.move_to(first)
    assert parameter.data is first and len(calls) == 1
    parameter.data += 1
    parameter.move_to(second)
    assert parameter.data is second and len(calls) == 1
    assert storage.tolist() == [1, 2, 3, 4, 5, 6] * 2
    parameter.materialize()
    assert parameter.data is second


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_deferred_gpt_becomes_the_same_gpt(dtype):
    expected = GPT(SMALL, seed=3, dtype=dtype)
    model = GPT(SMALL, seed=3, dtype=dtype, deferred=True)
    assert [(n, p.shape, p.dtype, p.decays) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.ndim >= 2) for n, p in expected.named_parameters()
    ]
    assert all(np.isnan(p.data).all() and p.data.base.size == 1 for p in model.parameters())
    storage = np.empty(sum(p.size for p in model.parameters()), dtype)
    end = 0
    for p in reversed(model.parameters()):  # another order than the model's
        start, end = end, end + p.size
        p.move_to(storage[start:end].reshape(p.shape))
    assert all(x.tobytes() == model.state_dict()[name].tobytes() for name, x in expected.state_dict().items())
    assert np.array_equal(model(TOKENS).data, expected(TOKENS).data)  # the head too reads `wte` where it is now


# ---- from files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_deferred_load_reads_each_tensor_on_demand_and_once(prefix, tmp_path):
    source = GPT(SMALL, seed=5)
    save_pretrained(source, tmp_path)
    state = {prefix + name: x for name, x in source.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    model = load_pretrained(tmp_path, dtype="float64", deferred=True)
    assert all(np.isnan(p.data).all() for p in model.parameters())
    for i, (name, parameter) in enumerate(model.named_parameters()):
        save_file({key: x + np.float32(i) for key, x in state.items()}, tmp_path / "model.safetensors")
        parameter.materialize()  # reads the file as it is now
        assert parameter.data.dtype == np.float64
        assert np.array_equal(parameter.data, state[prefix + name] + np.float32(i))
    (tmp_path / "model.safetensors").unlink()
    model.materialize()


def save_with_head(directory):
    """Write a GPT's files with its tied head in them, as some are."""
    save_pretrained(GPT(SMALL), directory)
    state = load_file(directory / "model.safetensors")
    save_file(state | {"lm_head.weight": state["wte.weight"].copy()}, directory / "model.safetensors")


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


@pytest.mark.parametrize(
    ("key", "dtype", "itemsize"),
    [("h.1.mlp.c_fc.weight", "F8_E4M3", 1), ("ln_f.bias", "I32", 4), ("lm_head.weight", "I32", 4)],
)
def test_a_tensor_of_another_dtype_is_refused_by_name(key, dtype, itemsize, tmp_path):
    save_with_head(tmp_path)
    rewrite_as(tmp_path / "model.safetensors", key, dtype, itemsize)
    with pytest.raises(UsageError, match=f"{key} .*{dtype}"):
        load_pretrained(tmp_path, deferred=True)


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


# ---- several files ---------------------------------------------------------------------------------------------------


def write_shards(directory, state, places):
    """Write each tensor into the file that `places` gives it, and the index."""
    for file in set(places.values()):
        save_file({name: x for name, x in state.items() if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture
def sharded(tmp_path):
    """Return a directory of two shards, the state in it, and which tensor is where."""
    save_pretrained(GPT(SMALL, seed=3), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
    write_shards(tmp_path, state, places)
    return tmp_path, state, places


def test_a_sharded_directory_loads_where_its_index_says(sharded):
    directory, state, places = sharded
    loaded = load_pretrained(directory).state_dict()
    assert all(np.array_equal(loaded[name], x) for name, x in state.items())
    older = {"wpe.weight": state["wpe.weight"] + 1, "ln_f.bias": state["ln_f.bias"]}
    other = next(file for file in places.values() if file != places["wpe.weight"])
    save_file(older | {n: x for n, x in state.items() if places[n] == other}, directory / other)
    loaded = load_pretrained(directory).state_dict()  # the tensor that the index puts into another file does not count
    assert np.array_equal(loaded["wpe.weight"], state["wpe.weight"])


def test_one_whole_file_comes_before_an_index(sharded):
    directory, state, _ = sharded
    save_file({name: x + 1 for name, x in state.items()}, directory / "model.safetensors")
    assert np.array_equal(load_pretrained(directory).state_dict()["wpe.weight"], state["wpe.weight"] + 1)


BAD_INDEXES = {
    "a shard missing": ({"ln_f.bias": "part-2.safetensors"}, "part-2.safetensors"),
    "a tensor elsewhere": ({"ln_f.bias": "part-0.safetensors", "ln_f.weight": "part-0.safetensors"}, "ln_f"),
    "a path upwards": ({"ln_f.bias": "../part-0.safetensors"}, "weight_map"),
    "a path from the root": ({"ln_f.bias": "/etc/passwd"}, "weight_map"),
    "the parent": ({"ln_f.bias": ".."}, ".."),
    "a number": ({"ln_f.bias": 3}, "weight_map"),
    "a name with a zero": ({"ln_f.bias": "a\0b"}, "a\0b"),
    "the config": ({"ln_f.bias": "config.json"}, "config.json"),
    "no map": (None, "weight_map"),
    "an empty map": ({}, "model.safetensors"),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_a_bad_index_is_refused_in_one_line(name, sharded):
    directory, _, places = sharded
    change, named = BAD_INDEXES[name]
    content = places | change if isinstance(change, dict) and change else change
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}))
    with pytest.raises(UsageError) as error:
        load_pretrained(directory)
    assert named in str(error.value) and "\n" not in str(error.value)
