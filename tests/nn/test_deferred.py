"""Claims about deferred values: a model is described first and filled piece by piece, from seeds."""

import numpy as np
import pytest

from minipar.nn import GPT, GPTConfig, Parameter, placeholder

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
