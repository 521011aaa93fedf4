"""Claims about deferred values: a model is described first and filled piece by piece, from seeds or files."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minipar.errors import UsageError
from minipar.nn import GPT, Deferred, GPTConfig, Parameter, placeholder
from minipar.nn.pretrained import load_pretrained, save_pretrained
from minipar.parallel.buckets import by_unit

SMALL = GPTConfig(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 4, 5], [5, 0, 10, 0, 5]])


def counted(shape=(2, 3), dtype="float32"):
    """Return Deferred values, and a list that gets an entry each time they are computed."""
    calls = []

    def make():
        calls.append(None)
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)

    return Deferred(shape, np.dtype(dtype), make), calls


def test_a_placeholder_is_one_read_only_nan_of_any_shape():
    array = placeholder((1000, 1000), np.float32)
    assert array.shape == (1000, 1000) and array.dtype == np.float32
    assert array.base.nbytes == 4 and np.isnan(array).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_a_deferred_parameter_has_a_shape_before_it_has_values():
    deferred, calls = counted()
    parameter = Parameter(deferred)
    assert (parameter.shape, parameter.dtype, parameter.size, parameter.ndim) == ((2, 3), np.float32, 6, 2)
    assert parameter.decays and not Parameter(counted((6,))[0]).decays
    assert np.isnan(parameter.data).all() and calls == []


def test_materialize_computes_the_values_once():
    deferred, calls = counted()
    parameter = Parameter(deferred)
    for _ in range(2):
        parameter.materialize()
        assert np.array_equal(parameter.data, [[0, 1, 2], [3, 4, 5]]) and len(calls) == 1
    present = Parameter(np.ones(2))
    data = present.data
    present.materialize()
    assert present.data is data


def test_moving_computes_or_copies_the_values_in_place():
    deferred, calls = counted()
    storage = np.full(12, -1, np.float32)
    first, second = (storage[i : i + 6].reshape(2, 3) for i in (0, 6))
    parameter = Parameter(deferred)
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


def test_the_parts_of_a_gpt_run_in_order_are_the_gpt():
    model = GPT(SMALL)
    assert [part.name for part in model.parts] == ["embedding", "h.0", "h.1", "head"]
    x = TOKENS
    for part in model.parts:
        x = part.run(x)
    assert np.array_equal(x.data, model(TOKENS).data)
    assert {p for part in model.parts for p in part.parameters} == set(model.parameters())
    assert model.wte.weight in model.parts[0].parameters and model.wte.weight in model.parts[-1].parameters
    grouped = by_unit(model)
    assert sorted(map(len, grouped)) == [4, 12, 12] and len(grouped[0]) == 4
    assert len({p for unit in grouped for p in unit}) == sum(map(len, grouped)) == len(model.parameters())


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


def test_a_deferred_load_refuses_a_wrong_file_at_once(tmp_path):
    save_pretrained(GPT(SMALL), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["wpe.weight"] = tensors["wpe.weight"][:3].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"wpe.weight has shape \(3, 8\), expected \(6, 8\)"):
        load_pretrained(tmp_path, deferred=True)


def rewrite_as(path, key, dtype, itemsize):
    """Write a safetensors file again by hand, with zeros of `dtype` for one tensor: NumPy has no bfloat16 to save."""
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
            piece, kind = bytes(int(np.prod(entry["shape"])) * itemsize), dtype
        table[name] = {"dtype": kind, "shape": entry["shape"], "data_offsets": [len(body), len(body) + len(piece)]}
        body += piece
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(("key", "dtype", "itemsize"), [("h.1.mlp.c_fc.weight", "BF16", 2), ("ln_f.bias", "I32", 4)])
def test_a_tensor_of_a_dtype_that_numpy_lacks_is_refused_by_name(key, dtype, itemsize, deferred, tmp_path):
    save_pretrained(GPT(SMALL), tmp_path)
    rewrite_as(tmp_path / "model.safetensors", key, dtype, itemsize)
    with pytest.raises(UsageError, match=f"model.safetensors: {key} is stored as {dtype}; expected one of F64, F32"):
        load_pretrained(tmp_path, deferred=deferred)


@pytest.mark.parametrize("key", ["wte.weight", "lm_head.weight"])
def test_a_bfloat16_head_or_embedding_is_refused_by_name(key, tmp_path):
    model = GPT(SMALL)
    save_pretrained(model, tmp_path)
    state = model.state_dict()
    save_file(state | {"lm_head.weight": state["wte.weight"].copy()}, tmp_path / "model.safetensors")
    rewrite_as(tmp_path / "model.safetensors", key, "BF16", 2)
    with pytest.raises(UsageError, match=f"{key}.*BF16|BF16.*{key}"):
        load_pretrained(tmp_path)


def test_the_rewriting_itself_leaves_a_file_that_can_be_read(tmp_path):
    save_pretrained(GPT(SMALL), tmp_path)
    rewrite_as(tmp_path / "model.safetensors", "ln_f.bias", "F64", 8)
    assert load_pretrained(tmp_path).state_dict()["ln_f.bias"].tolist() == [0] * 8


def test_half_precision_files_load(tmp_path):
    model = GPT(SMALL)
    save_pretrained(model, tmp_path)
    halves = {name: x.astype(np.float16) for name, x in model.state_dict().items()}
    save_file(halves, tmp_path / "model.safetensors")
    loaded = load_pretrained(tmp_path, deferred=True)
    for name, parameter in loaded.named_parameters():
        parameter.materialize()
        assert parameter.dtype == np.float32 and np.array_equal(parameter.data, halves[name].astype(np.float32))


def test_export_writes_the_given_state_instead_of_the_models(tmp_path):
    model = GPT(SMALL)
    state = {name: x + 1 for name, x in model.state_dict().items()}
    save_pretrained(GPT(SMALL, deferred=True), tmp_path, state)
    assert all(np.array_equal(x, state[name]) for name, x in load_pretrained(tmp_path).state_dict().items())
