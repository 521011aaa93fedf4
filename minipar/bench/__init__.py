"""Benchmarks, each with a baseline in the same run: `mpirun -n N python -m minipar.bench SUBCOMMAND --json FILE`.

    collectives.py   each collective next to MPI's own
    step.py          a training step next to PyTorch's; the ZeRO stages; the cost of synchronization (overlap)
    pipeline.py      the bubble of each pipeline schedule
    bits.py          the bits of one model trained in many layouts, with rings and with trees
    machine.py       the constants of this machine, and the planner's predictions with them next to measured steps

Two files have no benchmark of their own:

    costs.py         the pieces of a step: their CPU seconds by constants, and how the constants are fitted
    layouts.py       minipar's runs in the planner's terms, predicted and measured

This file has what they share: flags, and the rows of a benchmark as a table and a JSON file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minipar.cli import write_json
from minipar.comm.communicator import Communicator
from minipar.plan.report import table
from minipar.train.flags import count

HELP = {
    "layers": "Transformer layers",
    "hidden": "hidden size: elements per token between layers",
    "heads": "attention heads",
    "seq_len": "tokens per sample",
    "batch": "samples per rank, and per microbatch of a pipeline",
    "microbatches": "microbatches per step",
    "steps": "steps of each training",
    "repeat": "times that each thing is measured",
}


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add a flag for each of these whole numbers, with its default."""
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=count, default=default, help=f"{HELP[name]} ({default})")


def largest(comm: Communicator, value: float) -> float:
    """Return the largest value of all ranks."""
    return float(comm.all_reduce(np.array([float(value)]), op="max")[0])


def publish(comm: Communicator, rows: Sequence[Mapping[str, Any]], path: str | None) -> None:
    """Print the table of rank 0's rows, and write them to `path`; with "-" only JSON goes to standard output."""
    if comm.rank != 0:
        return
    if path != "-":
        print(_table_of(rows))
    if path is not None:
        write_json(path, rows)


def _table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(table(list(rows[0]), cells))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
