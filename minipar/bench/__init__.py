"""Benchmarks, each with a baseline in the same run: `mpirun -n N python -m minipar.bench SUBCOMMAND --json FILE`.

    collectives.py   each collective next to MPI's own
    step.py          a training step next to PyTorch's; the ZeRO stages; the cost of synchronization (overlap)
    pipeline.py      the bubble of each pipeline schedule
    reductions.py    a training step with each order of sums
    bits.py          the bits of one model trained in many layouts, with rings and with trees
    context.py       the balance of context parallelism's orders of tokens

The rest calibrates the planner and compares it with runs:

    costs.py         the pieces of a step: their measured CPU seconds, and constants fitted to them
    machine.py       the constants of this machine
    layouts.py       predictions next to measured steps, on this machine and on a modelled cluster

This file has what they share: flags, and the rows of a benchmark as a table and a JSON file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minipar.cli import write_json, write_out
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.plan.report import table


def add_model_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add --layers, --hidden, --heads, --seq-len and --vocab-size as far as `defaults` has them by these names."""
    words = {
        "layers": "Transformer layers",
        "hidden": "hidden size: elements per token between layers",
        "heads": "attention heads",
        "seq_len": "tokens per sample",
        "vocab_size": "vocabulary: token ids are 0 to V-1",
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


def publish(
    comm: Communicator, rows: Sequence[Mapping[str, Any]], path: str | None, hidden: Sequence[str] = ()
) -> None:
    """Print the table of rank 0's rows, without the `hidden` columns, and write all of them to `path`.

    With "-" only JSON goes to standard output. Collective. UsageError on every rank if either cannot be written.
    """
    error = None
    if comm.rank == 0:
        try:
            if path != "-":
                write_out(_table_of(rows, hidden))
            if path is not None:
                write_json(path, rows)
        except UsageError as problem:
            error = str(problem)
    comm.agree(error)


def _table_of(rows: Sequence[Mapping[str, Any]], hidden: Sequence[str]) -> str:
    columns = [column for column in rows[0] if column not in hidden]
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    return "\n".join(table(columns, cells)) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
