"""Deliberate mistakes: a check must notice each, and print what it says."""

from collections.abc import Callable
from typing import Any


def catcher(say: Callable[..., None]) -> Callable[..., None]:
    """Return `caught(mistake, check)`: run a check that must raise an `error`, and print its message with `say`."""

    def caught(mistake: str, check: Callable[[], Any], error: type[Exception] = AssertionError) -> None:
        try:
            check()
        except error as failure:
            say(f"caught: {mistake}\n        {failure}")
            return
        raise AssertionError(f"not caught: {mistake}")

    return caught
