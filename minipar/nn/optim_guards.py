"""Refusals of what a user gives to optimizers: settings, steps without gradients, names used twice, a saved state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, NoReturn

from minipar.backend import Array
from minipar.errors import UsageError
from minipar.nn.parameter import Parameter


def check_setting(name: str, value: Any) -> None:
    """Raise UsageError if an optimizer's setting of this name may not have this value, or if lr has another name."""
    if name in ("learning_rate", "LR", "learningrate"):
        raise UsageError(f"optimizer.{name} = {value!r} would change nothing: set optimizer.lr")
    if name in ("lr", "eps", "weight_decay") and not (is_number(value) and value >= 0):
        raise UsageError(f"optimizer: {name} = {value!r}: expected a finite number, 0 or larger")
    if name == "betas":
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        if not is_pair or not all(is_number(beta) and 0 <= beta < 1 for beta in value):
            raise UsageError(f"optimizer: betas = {value!r}: expected two numbers from 0 on and below 1")


def is_number(value: object) -> bool:
    """Return whether a value is one finite real number."""
    return isinstance(value, Real) and isfinite(value)


def refuse_groups() -> NoReturn:
    """Raise AttributeError: torch's list of groups does not exist here."""
    raise AttributeError("an optimizer has one group and no param_groups: set optimizer.lr = ...")


def list_of(parameters: object) -> list[Any]:
    """Return what an optimizer is given as a list. UsageError for a model, a wrapper or one parameter."""
    if isinstance(parameters, Iterable):
        return list(parameters)
    remedy = "give model.parameters() or wrapper.parameters()"
    raise UsageError(f"optimizer over a {type(parameters).__name__}: expected parameters; {remedy}")


def check_parameters(parameters: Sequence[object]) -> None:
    """Raise UsageError unless these are Parameters, one at least and each once."""
    if not parameters:
        remedy = "give model.parameters(); a generator is empty once it was read"
        raise UsageError(
            f"optimizer without parameters: {remedy}; a pipeline's rank that has none needs none"
        )
    for given in parameters:
        if isinstance(given, Parameter):
            continue
        kind, remedy = type(given).__name__, "give model.parameters() or wrapper.parameters()"
        if isinstance(given, dict):
            remedy = (
                "an optimizer has one group; give one list of parameters (those below two dims never decay)"
            )
        elif isinstance(given, tuple):
            remedy = "give model.parameters(), without names"
        raise UsageError(f"optimizer over a {kind}: expected parameters; {remedy}")
    twice = len(parameters) - len(set(parameters))
    if twice:
        remedy = "give each once, or every step would change them several times"
        raise UsageError(
            f"optimizer over {len(parameters)} parameters, {twice} of which repeat others: {remedy}"
        )


def check_max_norm(max_norm: object) -> None:
    """Raise UsageError unless gradients can be scaled down to this norm: a negative one would turn them around."""
    # A NaN is not larger than 0.
    if max_norm is not None and not (isinstance(max_norm, Real) and float(max_norm) > 0):
        remedy = "expected a number larger than 0, or None for the norm alone"
        raise UsageError(f"clip_grad_norm: max_norm = {max_norm!r}: {remedy}")


def check_gradients(parameters: Sequence[Parameter], call: str = "optimizer.step()") -> None:
    """Raise RuntimeError if this call would do nothing, because no parameter has a gradient."""
    held = [parameter for parameter in parameters if parameter.size]  # a rank's shard may be empty
    if held and all(parameter.grad is None for parameter in held):
        remedy = "call loss.backward() before step(), and zero_grad() after it"
        raise RuntimeError(f"{call} without gradients: all {len(held)} parameters have none; {remedy}")


def check_unused(parameters: Sequence[Parameter]) -> None:
    """Raise RuntimeError if a step would use gradients a second time, alone or with those of another backward.

    This compares arrays, so a gradient that the program itself has assigned is a new one. Gradients
    in flat storage are the same array in each step; the strategy that keeps it knows which of them
    were used.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient is parameter.used_gradient and parameter.grad_buffer is None:
            why = "optimizer.step() would use the gradients of the last step again"
            remedy = "call optimizer.zero_grad() after each step, and give each parameter to one optimizer"
            raise RuntimeError(f"{why}: {remedy}")


def check_sizes(parameter: Parameter, moment: Array) -> None:
    """Raise ValueError if a parameter has another shape than when the optimizer was made."""
    if parameter.shape != moment.shape:
        sizes = f"a parameter of shape {moment.shape} has the shape {parameter.shape} now"
        remedy = "split the model first (mp.tensor_parallel, ...), then make the optimizer"
        raise ValueError(f"optimizer.step(): {sizes}: {remedy}")


def check_names(parameters: Sequence[Parameter]) -> None:
    """Raise UsageError if two parameters are drawn by one name: their initial values would be the same."""
    seen: dict[tuple[int, str], Parameter] = {}
    for parameter in parameters:
        if parameter.drawn_by is None:
            continue
        first = seen.setdefault(parameter.drawn_by, parameter)
        if first is not parameter:
            seed, name = parameter.drawn_by
            two = f"two parameters of the model, of shapes {first.shape} and {parameter.shape}, are drawn by the name"
            layer = name.rpartition(".")[0]
            remedy = f'give each layer a name of its own, such as name="blocks.0.{layer}", or another seed'
            raise UsageError(f'{two} "{name}" and seed {seed}, and so start from the same values: {remedy}')


def check_state(
    state: Mapping[str, Any], parameters: Sequence[Parameter], moments: Callable[[int], Mapping[str, Any]]
) -> None:
    """Raise ValueError unless an optimizer's saved state is one of these parameters; `moments(i)` are the arrays kept.

    A state before the first step holds nothing. Torch's state does not say which elements it holds.
    """
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        raise ValueError(
            f"optimizer state without {' and '.join(missing)}: expected what optimizer.state_dict() returns"
        )
    if len(state["param_groups"]) != 1:
        raise ValueError(f"optimizer state of {len(state['param_groups'])} param_groups: expected one")
    count = len(state["param_groups"][0]["params"])
    if count != len(parameters):
        raise ValueError(
            f"optimizer state of {count} parameters, but this rank's optimizer holds {len(parameters)}"
        )
    for own, saved in zip(parameters, state.get("holds", ()), strict=False):
        if saved and own.describe() and saved != own.describe():
            remedy = "load it on the rank that saved it, in the same layout"
            raise ValueError(
                f"optimizer state of {saved}, but this rank's optimizer holds {own.describe()}: {remedy}"
            )
    steps = {int(entry["step"]) for entry in state["state"].values()}
    if len(steps) > 1 or (steps and set(state["state"]) != set(range(count))):
        raise ValueError(
            f"optimizer state of {len(state['state'])} of {count} parameters, after {sorted(steps)} steps"
        )
    for i, entry in state["state"].items():
        for name, array in moments(i).items():
            if name in entry and tuple(entry[name].shape) != array.shape:
                given = f"{name} of parameter {i} with shape {tuple(entry[name].shape)}"
                raise ValueError(f"optimizer state has {given}, expected {array.shape}")
            if name not in entry and name != "master":
                raise ValueError(f"optimizer state has no {name} of parameter {i}")
