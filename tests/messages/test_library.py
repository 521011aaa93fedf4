"""Claims about mistakes on one device: each raises an error of its class that shows the user's own values."""

import numpy as np
import pytest
from refusals import refused

import minipar as mp
from minipar.errors import UsageError
from minipar.nn import Linear

SIZES = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
SHAPE = mp.GPTConfig(**SIZES)
LLAMA = mp.LlamaConfig(11, 8, 8, 1, 2)
MIXTRAL = mp.MixtralConfig(11, 8, 8, 1, 2, 2)
X = np.arange(8).reshape(2, 4)
Y = X + 1


def gpt(**options):
    return mp.GPT(SHAPE, **options)


# ---- models ----------------------------------------------------------------------------------------------------------


def calls(*arguments):
    return lambda: gpt()(*arguments)


MODELS = {
    "a dropout above 1": (lambda: gpt(dropout=1.5), UsageError, "dropout", "1.5"),
    "tokens of float": (calls(X * 1.0), UsageError, "float64"),
    "tokens of bool": (calls(X.astype(bool)), UsageError, "bool"),
    "a Tensor of tokens": (calls(mp.Tensor(X * 1.0)), TypeError, "Tensor", ".data"),
    "more tokens than positions": (calls(np.zeros((1, 9), int)), UsageError, "wpe", "8", "7"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_cannot_be_made_of_is_refused(name):
    program, error, *values = MODELS[name]
    refused(error, *values, by=program)


def loads(state):
    return lambda: Linear(2, 3, name="fc").load_state_dict(state)


def loads_changed(**changes):
    """Load a GPT's own state with arrays added, or taken away where None is given."""

    def program():
        model = gpt()
        state = model.state_dict() | {name.replace("__", "."): array for name, array in changes.items()}
        model.load_state_dict({name: array for name, array in state.items() if array is not None})

    return program


STATES = {
    "that of another rank": (loads({}), ValueError, "weight"),
    "a missing name": (loads_changed(wpe__weight=None), ValueError, "wpe.weight"),
    "unexpected names": (loads_changed(foo=X, bar=X), ValueError, "foo"),
    "another shape": (loads_changed(wpe__weight=np.zeros(2)), ValueError, "wpe.weight", "(2,)", "(8, 8)"),
    "another model's": (lambda: gpt().load_state_dict({"foo": X}), ValueError, "wte.weight"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_a_model_does_not_have_is_refused(name):
    program, error, *values = STATES[name]
    refused(error, *values, by=program)
