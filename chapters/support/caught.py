"""Run checks that must notice a deliberate mistake, and print what they say (chapters 1 to 3)."""

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
