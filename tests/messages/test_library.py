"""Claims about mistakes on one device: each raises an error of its class that shows the user's own values."""

import numpy as np
import pytest
from refusals import refused
from training import MLP

import minipar as mp
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module, Parameter, clip_grad_norm

SIZES = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
SHAPE = mp.GPTConfig(**SIZES)
LLAMA = mp.LlamaConfig(11, 8, 8, 1, 2)
MIXTRAL = mp.MixtralConfig(11, 8, 8, 1, 2, 2)
NAN = float("nan")
X = np.arange(8).reshape(2, 4)
Y = X + 1


def gpt(**options):
    return mp.GPT(SHAPE, **options)


def sized(**sizes):
    return mp.GPT(mp.GPTConfig(**SIZES | sizes))


def pair():
    model = gpt()
    return model, AdamW(model.parameters(), lr=0.1)


# ---- optimizers ------------------------------------------------------------------------------------------------------

SETTINGS = [
    ("lr", NAN, "nan"),
    ("lr", -1e-3, "-0.001"),
    ("lr", None, "None"),
    ("lr", "1e-3", "1e-3"),
    ("eps", -1e-8, "-1e-08"),
    ("weight_decay", float("inf"), "inf"),
    ("betas", (0.9, 1.0), "(0.9, 1.0)"),
    ("betas", (0.9,), "(0.9,)"),
    ("betas", 0.9, "0.9"),
    ("betas", (0.9, None), "None"),
]


@pytest.mark.parametrize(("name", "value", "shows"), SETTINGS)
def test_a_setting_is_refused_when_made_and_when_assigned(name, value, shows):
    optimizer = AdamW(MLP().parameters())
    before = getattr(optimizer, name)
    refused(UsageError, name, shows, by=lambda: AdamW(MLP().parameters(), **{name: value}))
    refused(UsageError, name, shows, by=lambda: setattr(optimizer, name, value))
    assert getattr(optimizer, name) == before


def other_shape():
    parameter = Parameter(np.zeros((2, 3)))
    optimizer = AdamW([parameter])
    parameter.data, parameter.grad = np.zeros((1, 3)), np.zeros((1, 3))
    optimizer.step()


def repeated():
    parameters = MLP().parameters()
    AdamW(parameters + parameters[:1])


class Twice(Module):
    """Two layers of one name."""

    def __init__(self, columns=4):
        self.one, self.two = Linear(4, 4, name="fc", bias=False), Linear(4, columns, name="fc", bias=False)


def clip(max_norm):
    parameter = Parameter(np.zeros(2))
    parameter.grad = np.array([3.0, 4.0])
    try:
        clip_grad_norm([parameter], max_norm)
    finally:
        assert parameter.grad.tolist() == [3.0, 4.0]


def sets(name, value):
    return lambda: setattr(pair()[1], name, value)


OPTIMIZERS = {
    "no parameters": (lambda: AdamW([]), UsageError, "model.parameters()"),
    "a model": (lambda: AdamW(gpt()), UsageError, "GPT", "model.parameters()"),
    "one parameter": (lambda: SGD(Parameter(np.zeros(2))), UsageError, "Parameter", "model.parameters()"),
    "names": (lambda: AdamW(gpt().named_parameters()), UsageError, "tuple"),
    "groups": (lambda: AdamW([{"params": gpt().parameters()}]), UsageError, "dict"),
    "a state": (lambda: AdamW(gpt().state_dict()), UsageError, "str"),
    "arrays": (lambda: AdamW([p.data for p in gpt().parameters()]), UsageError, "ndarray"),
    "a parameter twice": (repeated, UsageError, "5", "1"),
    "two layers of one name": (lambda: AdamW(Twice().parameters()), UsageError, "fc.weight", "0"),
    "their shapes": (lambda: AdamW(Twice(8).parameters()), UsageError, "(4, 4)", "(4, 8)"),
    "two models of one seed": (lambda: AdamW(gpt().parameters() + gpt().parameters()), UsageError, "wte.weight"),
    "torch's groups": (lambda: pair()[1].param_groups, AttributeError, "param_groups", "optimizer.lr"),
    "another name of lr": (sets("learning_rate", 0.1), UsageError, "learning_rate", "0.1", "optimizer.lr"),
    "a parameter of another shape": (other_shape, ValueError, "(2, 3)", "(1, 3)"),
    "a negative norm": (lambda: clip(-1.0), UsageError, "max_norm", "-1.0"),
    "a norm of 0": (lambda: clip(0.0), UsageError, "max_norm", "0.0"),
    "a norm of text": (lambda: clip("1.0"), UsageError, "max_norm", "1.0"),
    "a norm that is nan": (lambda: clip(NAN), UsageError, "max_norm", "nan"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_cannot_use_is_refused(name):
    program, error, *values = OPTIMIZERS[name]
    refused(error, *values, by=program)


# ---- models ----------------------------------------------------------------------------------------------------------


def calls(*arguments):
    return lambda: gpt()(*arguments)


MODELS = {
    "heads that do not divide": (lambda: sized(n_head=3), ValueError, "8", "3"),
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
    "that of another rank": (loads({}), ValueError, "weight", "bias"),
    "a missing name": (loads_changed(wpe__weight=None), ValueError, "wpe.weight"),
    "unexpected names": (loads_changed(foo=X, bar=X), ValueError, "foo", "bar"),
    "another shape": (loads_changed(wpe__weight=np.zeros(2)), ValueError, "wpe.weight", "(2,)", "(8, 8)"),
    "another model's": (lambda: gpt().load_state_dict({"foo": X}), ValueError, "wte.weight"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_a_model_does_not_have_is_refused(name):
    program, error, *values = STATES[name]
    refused(error, *values, by=program)
