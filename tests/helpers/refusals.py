"""How a refusal is checked: by its class and by the user's own values, and on several ranks by every one of them."""

import re

import numpy as np
import pytest

import minipar as mp
from minipar.comm import run_local


def run_script(script: str, **names) -> None:
    """Run the lines that a user has written, where `mp`, `np` and these names mean something."""
    exec(script, {"mp": mp, "np": np} | names)


def shown(message: str, value: str) -> bool:
    """Whether a message shows a value, and not as a part of a longer word or number."""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(value)}(?!\w)", message) is not None


def check_message(message: str, *values: str) -> None:
    """Check that a message is one line of at most 400 letters that shows each of these values."""
    missing = [value for value in values if not shown(message, value)]
    assert missing == [], f"not in the message: {missing}\n{message}"
    assert "\n" not in message and len(message) <= 400, message


def refused(error: type[Exception], *values: str, by) -> None:
    """Check that a call raises this error, with these values of the user in its message."""
    with pytest.raises(error) as caught:
        by()
    check_message(str(caught.value), *values)


def refused_on_every_rank(size: int, error: type[Exception], *values: str, by) -> None:
    """Check that `by(world)` is refused on each rank: one that goes on, or waits for the others, fails here."""
    run_local(size, lambda world: refused(error, *values, by=lambda: by(world)))
