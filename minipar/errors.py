"""The two ways a job ends early on purpose, and how the first is said on a command line."""

import argparse
from typing import NoReturn


class UsageError(ValueError):
    """The user's input is wrong: every rank raises it, one rank prints one line, the job exits with code 2."""


class CommunicationError(RuntimeError):
    """A message had the wrong size, a peer died, a wait timed out, or no rank can go on."""


def error_line(error: UsageError) -> str:
    """What is printed of it: one line, whatever the message holds."""
    return f"minipar: error: {' '.join(str(error).split())}"


class UsageParser(argparse.ArgumentParser):
    """argparse, where a mistake is a UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
