"""A reader's predictions: asked for before a result is shown, and compared with it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

_predictions: dict[str, Any] = {}


def predict(name: str, value: Any) -> None:
    """Keep the reader's prediction of a result until `reveal` is called with the same name.

    A chapter says `predict("bytes", ...)`. The reader writes a value in the place of the three dots.
    """
    _predictions[name] = value


def reveal(name: str, result: Any, say: Callable[..., None] = print, unit: str = "") -> None:
    """Print a result beside what the reader predicted. KeyError if no cell has asked for a prediction."""
    predicted = _predictions[name]
    shown = f"{_shown(result)} {unit}".rstrip()
    if isinstance(predicted, EllipsisType):
        say(f"{name}: {shown}")
    elif _agree(predicted, result):
        say(f"{name}: {shown}, as you predicted")
    else:
        say(f"{name}: {shown}; you predicted {_shown(predicted)}{_compared(predicted, result)}")


def _shown(value: Any) -> str:
    """Return a value as the chapters print values. A set is sorted: its own order differs from run to run."""
    if isinstance(value, set) and value:
        return "{" + ", ".join(map(repr, sorted(value))) + "}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _is_value(value: Any) -> bool:
    """Return whether this is an integer or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _agree(predicted: Any, result: Any) -> bool:
    """Return whether a prediction is right: to 1 % for a float, otherwise exactly."""
    if isinstance(result, float) and _is_value(predicted):
        return abs(predicted - result) <= 0.01 * abs(result)
    return bool(predicted == result)


def _compared(predicted: Any, result: Any) -> str:
    """Return by which factor the result differs from the prediction, if both are values above 0."""
    if not _is_value(predicted) or not _is_value(result) or predicted <= 0 or result <= 0:
        return ""
    return f", and the result is {result / predicted:.3g} times that"
