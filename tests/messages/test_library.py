"""Claims about mistakes on one device: each raises an error of its class that shows the user's own values."""

import numpy as np
import pytest
from refusals import refused
from training import MLP

import minipar as mp
from minipar.errors import UsageError
from minipar.nn import AdamW, Linear, Module

SIZES = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
SHAPE = mp.GPTConfig(**SIZES)
LLAMA = mp.LlamaConfig(11, 8, 8, 1, 2)
MIXTRAL = mp.MixtralConfig(11, 8, 8, 1, 2, 2)
X = np.arange(8).reshape(2, 4)
Y = X + 1


def gpt(**options):
    return mp.GPT(SHAPE, **options)


def sized(**sizes):
    return mp.GPT(mp.GPTConfig(**SIZES | sizes))


# ---- optimizers ------------------------------------------------------------------------------------------------------


def repeated():
    parameters = MLP().parameters()
    AdamW(parameters + parameters[:1])


class Twice(Module):
    """Two layers of one name."""

    def __init__(self):
        self.one, self.two = Linear(4, 4, name="fc", bias=False), Linear(4, 4, name="fc", bias=False)


OPTIMIZERS = {
    "two layers of one name": (lambda: AdamW(Twice().parameters()), UsageError, "fc.weight", "0"),
    "a parameter twice": (repeated, UsageError, "twice"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_cannot_use_is_refused(name):
    program, error, *values = OPTIMIZERS[name]
    refused(error, *values, by=program)


# ---- models ----------------------------------------------------------------------------------------------------------


def a_set_of_layers():
    model = Module()
    model.layers = {Linear(2, 2, name="a")}
    model.parameters()


def linear(shape):
    return lambda: Linear(4, 2, name="layer")(np.zeros(shape))


def calls(*arguments):
    return lambda: gpt()(*arguments)


MODELS = {
    "a size of float": (lambda: sized(n_embd=16.0), UsageError, "n_embd", "16.0"),
    "a size of text": (lambda: sized(vocab_size="11"), UsageError, "vocab_size", "'11'"),
    "no layers": (lambda: sized(n_layer=0), ValueError, "n_layer", "0", "1"),
    "heads that do not divide": (lambda: sized(n_head=3), ValueError, "8", "3"),
    "another model's config": (lambda: mp.GPT(LLAMA), UsageError, "GPT", "mp.Llama(config)"),
    "one more of them": (lambda: mp.Llama(MIXTRAL), UsageError, "Llama", "mp.Mixtral(config)"),
    "no config": (lambda: mp.GPT({"n_embd": 8}), UsageError, "dict", "mp.GPTConfig"),
    "a dtype that no model has": (lambda: gpt(dtype="half"), UsageError, "half", "float16", "bf16"),
    "no dtype at all": (lambda: mp.Mixtral(MIXTRAL, dtype=None), UsageError, "Mixtral", "None"),
    "a dropout above 1": (lambda: gpt(dropout=1.5), UsageError, "dropout", "1.5"),
    "a dropout of text": (lambda: gpt(dropout="0.1"), UsageError, "dropout", "0.1"),
    "a set of layers": (a_set_of_layers, UsageError, "layers", "set"),
    "too few columns": (linear((2, 3)), UsageError, "4", "(2, 3)"),
    "no dims": (linear(()), UsageError, "4", "()"),
    "tokens of one dim": (calls(X[0]), UsageError, "(4,)", "tokens[None]"),
    "tokens of three dims": (calls(X[..., None]), UsageError, "(2, 4, 1)"),
    "tokens in a list": (calls(X.tolist()), UsageError, "list", "np.array(tokens)"),
    "tokens of float": (calls(X * 1.0), UsageError, "float64", "tokens.astype(int)"),
    "tokens of bool": (calls(X.astype(bool)), UsageError, "bool"),
    "a Tensor of tokens": (calls(mp.Tensor(X * 1.0)), UsageError, "Tensor", "tokens.data"),
    "more tokens than positions": (calls(np.zeros((1, 9), int)), ValueError, "9", "8"),
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
    "a list": (loads([1]), UsageError, "list", "state_dict()"),
    "a path": (loads("model.npz"), UsageError, "str", "state_dict()"),
    "an optimizer's": (loads({"state": {}, "param_groups": []}), UsageError, "optimizer.load_state_dict(state)"),
    "that of another rank": (loads({}), UsageError, "state_dict()", "0"),
    "a number": (loads({"fc.weight": 1.0}), UsageError, "fc.weight", "float"),
    "lists": (loads({"fc.weight": [1.0]}), UsageError, "fc.weight", "list"),
    "complex values": (loads({"fc.weight": np.zeros(2, complex)}), UsageError, "fc.weight", "complex128"),
    "words": (loads({"fc.weight": np.array(["a"])}), UsageError, "fc.weight", "<U1"),
    "objects": (loads({"fc.weight": np.array([None])}), UsageError, "fc.weight", "object"),
    "a missing name": (loads_changed(wpe__weight=None), ValueError, "wpe.weight"),
    "unexpected names": (loads_changed(foo=X, bar=X), ValueError, "foo", "bar"),
    "another shape": (loads_changed(wpe__weight=np.zeros(2)), ValueError, "wpe.weight", "(2,)", "(8, 8)"),
    "another model's": (lambda: gpt().load_state_dict({"foo": X}), ValueError, "foo", "wte.weight"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_a_model_does_not_have_is_refused(name):
    program, error, *values = STATES[name]
    refused(error, *values, by=program)
