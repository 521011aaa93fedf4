"""Refusals of batches and of layers' inputs: one line each, which shows the values and the remedy."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import Tensor, grad_enabled
from minipar.backend import Array
from minipar.errors import UsageError

SHOWN = 3  # names in an error; of more, their number is


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}  # NumPy's name of each


# True while a data-parallel wrapper computes its loss.
inside_loss: ContextVar[bool] = ContextVar("inside_loss", default=False)


def check_made_outside(name: str) -> None:
    """Raise UsageError if a wrapper computes its loss now: it would not train this layer."""
    if inside_loss.get() and grad_enabled.get():
        why = f'the layer of "{name}" was made inside the loss of a wrapper'
        raise UsageError(f"{why}, which does not train it: make all layers in __init__")


def float_dtype(model: str, dtype: DTypeLike) -> str:
    """Return NumPy's name of a model's dtype, which may be one of DTYPES. UsageError unless it is one of these."""
    given = str(getattr(dtype, "__name__", dtype))  # np.float32 has a name, too
    name = DTYPES.get(given, given)
    if name not in DTYPES.values():
        raise UsageError(
            f"{model}(dtype={dtype!r}): expected {', '.join(DTYPES)} or {', '.join(DTYPES.values())}"
        )
    return name


def check_probability(p: object) -> None:
    """Raise UsageError unless elements can be dropped with probability `p`."""
    if not isinstance(p, Real) or not 0 <= float(p) < 1:
        raise UsageError(f"dropout = {p!r}: expected a probability from 0 on and below 1")


def check_size(name: str, value: object) -> None:
    """Raise UsageError unless a model's size is an integer, and ValueError unless it is at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} = {value!r}: expected an integer")
    if value < 1:
        raise ValueError(f"{name} = {value}, expected at least 1")


def check_config(model: str, expected: Any, config: object) -> None:
    """Raise UsageError unless a model is made from its own kind of config."""
    if getattr(config, "model_type", None) != expected.model_type:
        given = type(config).__name__
        remedy = f"give an mp.{expected.__name__}"
        if hasattr(config, "build"):
            remedy += f", or write mp.{given.removesuffix('Config')}(config)"
        raise UsageError(f"{model} of a {given}: {remedy}")


def array_of(what: str, value: object) -> Array:
    """Return the array of a batch, read from a tensor of torch if it is one. UsageError for a list or a Tensor."""
    if isinstance(value, Tensor):
        raise UsageError(f"{what} are a Tensor: give its array, {what}.data")
    if isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise UsageError(f"{what} are a {type(value).__name__}: give an array, as np.array({what})")


def check_tokens(tokens: Array) -> None:
    """Raise UsageError unless the tokens are integers (B, T)."""
    if tokens.ndim != 2:
        raise UsageError(
            f"tokens of shape {tokens.shape}: expected (samples, tokens), as tokens[None] for one sample"
        )
    if tokens.dtype.kind not in "iu":
        raise UsageError(f"tokens of {tokens.dtype}: expected integers, as tokens.astype(int)")


def check_columns(layer: str, inputs: int, shape: tuple[int, ...]) -> None:
    """Raise UsageError unless the last dim of a layer's input has `inputs` elements."""
    if not shape or shape[-1] != inputs:
        raise UsageError(
            f"{layer} of {inputs} inputs: x has the shape {shape}, whose last dim must be {inputs}"
        )


def check_state(state: Any, parameters: int) -> None:
    """Raise UsageError unless the state of a model of so many parameters maps names to arrays of real values."""
    kind = type(state).__name__
    if not isinstance(state, Mapping):
        raise UsageError(
            f"load_state_dict of a {kind}: give what state_dict() returned, arrays by their names"
        )
    if "param_groups" in state:
        raise UsageError(
            "load_state_dict: this is an optimizer's state: write optimizer.load_state_dict(state)"
        )
    if len(state) == 0 and parameters > 0:
        why = "state_dict() of a wrapper returns the model on rank 0, and {} on the others"
        raise UsageError(
            f"load_state_dict of an empty state: {why}; load what rank 0 has saved, on every rank"
        )
    for name in state:
        array = state[name]
        if not hasattr(array, "shape"):
            raise UsageError(
                f"load_state_dict: {name} is a {type(array).__name__}: give an array, as np.array(value)"
            )
        if getattr(array.dtype, "kind", "") in ("c", "O", "S", "U"):
            raise UsageError(f"load_state_dict: {name} holds {array.dtype}: expected real values")


def refuse_set(name: str) -> NoReturn:
    """Raise UsageError: the ranks would name and reduce the members of a set in different orders."""
    raise UsageError(f"{name} is a set of modules: a set has no order; give a list")


def listed(what: str, names: Sequence[str]) -> list[str]:
    """Return what to say of these names in an error: nothing if there are none, and the first ones of many."""
    if not names:
        return []
    if len(names) <= SHOWN:
        return [f"{what} {', '.join(names)}"]
    return [f"{what} {len(names)} names: {', '.join(names[:SHOWN])}, ..."]
