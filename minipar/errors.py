"""The two ways a job ends early on purpose, and how the first is said on a command line."""

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


class UsageError(ValueError):
    """The user's input is wrong: every rank raises it, one rank prints one line, the job exits with code 2."""


class CommunicationError(RuntimeError):
    """A message had the wrong size, a peer died, a wait timed out, or no rank can go on."""


def error_line(error: UsageError) -> str:
    """What is printed of it: one line, whatever the message holds."""
    return f"minipar: error: {' '.join(str(error).split())}"


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelled most like `name`, or "" if none is close.

    Case and punctuation do not count: LLaMA-3-70B and llama3_70b are both llama-3-70b.
    """
    spelled = {re.sub(r"[\W_]", "", choice).lower(): choice for choice in choices}
    close = difflib.get_close_matches(re.sub(r"[\W_]", "", name).lower(), spelled, n=1)
    return spelled[close[0]] if close else ""


class UsageParser(argparse.ArgumentParser):
    """argparse, where a mistake is a UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
