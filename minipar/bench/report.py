"""A benchmark's frame: the subcommand, flags that several share, and its rows as a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.plan.report import table

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Subcommand:
    """A benchmark of the command line: help text, flags besides --json, and `run(comm, args)` on every rank."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Communicator, argparse.Namespace], None]


def add_model_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add --layers, --hidden, --heads, --seq-len and --vocab-size as far as `defaults` has them by these names."""
    words = {
        "layers": "Transformer layers",
        "hidden": "hidden size",
        "heads": "attention heads",
        "seq_len": "tokens per sample",
        "vocab_size": "tokens that exist",
    }
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{words[name]} ({default})")


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError, naming all of these flags, unless each is at least 1."""
    if min(getattr(args, name) for name in names) < 1:
        flags = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names)
        raise UsageError(f"{flags}: expected at least 1 of each")


def largest(comm: Communicator, value: float) -> float:
    """Return the largest value of all ranks."""
    return float(comm.all_reduce(np.array([float(value)]), op="max")[0])


def publish(comm: Communicator, rows: Sequence[Row], columns: Sequence[str], path: str | None) -> None:
    """Print the table of rank 0's rows and write them to `path`; with "-" only JSON goes to standard output.

    Collective. UsageError on every rank if the file cannot be written.
    """
    error = None
    if comm.rank == 0:
        if path != "-":
            print("\n".join(table(columns, [[_cell(row[column]) for column in columns] for row in rows])), flush=True)
        try:
            if path == "-":
                json.dump(rows, sys.stdout, indent=1)
                print(flush=True)
            elif path is not None:
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(rows, file, indent=1)
        except OSError as problem:
            error = f"--json {path}: {problem.strerror}"
    comm.agree(error)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
