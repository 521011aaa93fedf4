"""Runs of the command `visualize` in the tests of its flags."""

import json

from visualize.__main__ import main


def failure(capsys, *arguments) -> str:
    """Return the one line that a wrong command prints."""
    assert main([*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err.removeprefix("visualize: error: ").removesuffix("\n")


def told(capsys, *arguments) -> dict:
    """Return what `visualize schedule ... --json -` says, and check that it says nothing else."""
    assert main(["schedule", *map(str, arguments), "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)
