"""The constants of this machine: what minipar computes in (costs.py), and what a message takes (messages.py).

All ranks work at once, since caches and memory are shared. Pieces are measured one by one on the CPU time of each rank,
messages on the wall clock; nothing is fitted to whole training steps. Shapes that no constant was fitted to show how
good the constants are.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from minipar.bench import messages, pieces
from minipar.bench.costs import fit_costs
from minipar.bench.pieces import Shape
from minipar.bench.report import publish
from minipar.comm import Communicator
from minipar.errors import UsageError

HELP = "this machine's constants: rate of products, seconds per byte, per call and per message, and how well they hold"
COLUMNS = (
    "row", "name", "value", "unit", "hidden", "seq_len", "samples", "tp", "sequence_parallel", "fitted", "bytes",
    "seconds", "predicted", "ratio",
)  # fmt: skip
HEADS = 8  # at the middle hidden size; the others have heads of the same size
# Around the middle (hidden, seq_len): hidden * and seq_len * these, samples, tp, sequence_parallel, vocabulary *.
FITTED: tuple[tuple[Any, ...], ...] = (
    (0.25, 0.5, 2), (0.25, 2, 4), (0.5, 1, 4), (0.5, 2, 4), (1, 1, 1), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 1, 2),
    (2, 1, 4), (1, 1, 8, 2), (1, 1, 8, 8), (1, 1, 4, 4), (1, 1, 8, 4, True), (2, 1, 4, 2, True), (1, 1, 4, 1, False, 4),
    (1, 1, 32, 8), (1, 1, 32, 8, True), (1, 1, 16, 2, True),
)  # fmt: skip
CHECKED: tuple[tuple[Any, ...], ...] = (
    (0.5, 1, 2), (0.5, 1, 8), (1, 0.5, 4), (1, 1, 2), (1, 2, 2), (2, 0.5, 2), (1, 1, 8, 4), (1, 1, 4, 2), (1, 1, 4, 8),
    (2, 1, 8, 4, True), (1, 2, 2, 2, False, 2),
)  # fmt: skip

UNITS = {
    "byte": "kept byte", "block": "block and pass", "logit": "element of logits", "hidden": "element of hidden",
    "call": "pass", "parameter": "parameter", "tensor": "tensor",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench machine`."""
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON (- for standard output)")
    parser.add_argument("--hidden", type=int, default=256, help="middle of the hidden sizes, a multiple of 8 (256)")
    parser.add_argument("--seq-len", type=int, default=64, help="middle of the sequence lengths, a multiple of 4 (64)")
    parser.add_argument("--vocab-size", type=int, default=256, help="least number of tokens that exist (256)")
    parser.add_argument("--repeat", type=int, default=3, help="times that each piece is measured")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """A row for each constant, for each piece and shape, and for each size of message (none on a single rank)."""
    if args.repeat < 1 or args.vocab_size < HEADS:
        raise UsageError(f"--repeat {args.repeat} --vocab-size {args.vocab_size}: expected at least 1 and {HEADS}")
    if args.hidden < 1 or args.hidden % HEADS or args.seq_len < 1 or args.seq_len % 4:
        raise UsageError(f"--hidden {args.hidden} --seq-len {args.seq_len}: expected multiples of {HEADS} and 4")
    publish(comm, measure(comm, args.hidden, args.seq_len, args.vocab_size, args.repeat), COLUMNS, args.json)


def shapes(hidden: int, seq_len: int, vocab_size: int) -> list[tuple[Shape, bool]]:
    """Those that are measured around this hidden size and length, and whether constants are fitted to them."""

    def around(wide: float, long: float, samples: int, tp: int = 1, sequence: bool = False, words: int = 1) -> Shape:
        sizes = int(hidden * wide), int(HEADS * wide), int(seq_len * long)
        return Shape(*sizes, samples, tp, sequence, vocab_size * words)

    return [(around(*row), row in FITTED) for row in FITTED + CHECKED]


def measure(comm: Communicator, hidden: int, seq_len: int, vocab_size: int, repeat: int) -> list[dict[str, Any]]:
    """All rows, the same on every rank. Collective.

    row "constant": name, value, unit. row "piece": seconds on the CPU beside the predicted ones, for a shape.
    row "message": seconds of one way, for so many bytes.
    """
    asked = shapes(hidden, seq_len, vocab_size)
    found = [(shape, fitted, pieces.measure(comm, shape, repeat)) for shape, fitted in asked]
    costs = fit_costs([(shape, measured) for shape, fitted, measured in found if fitted])
    rows = [_row("constant", name, value=value, unit=_unit(name)) for name, value in asdict(costs).items()]
    sent: list[dict[str, Any]] = []
    if comm.size > 1:
        network, sent = messages.measure(comm)
        rows += [
            _row("constant", "message_alpha", value=network.alpha, unit="seconds"),
            _row("constant", "message_beta", value=network.beta, unit="seconds per byte"),
        ]
    for shape, fitted, measured in found:
        for piece in (name for name in measured if name != "parameters"):
            predicted = costs.seconds(piece, shape, measured["parameters"])
            rows.append(_row("piece", piece, fitted=fitted, **_against(measured[piece], predicted), **asdict(shape)))
    for row in sent:
        rows.append(_row("message", "one way", bytes=row["bytes"], **_against(row["seconds"], row["predicted"])))
    return rows


def _row(row: str, name: str, **told: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"row": row, "name": name} | told


def _against(seconds: float, predicted: float) -> dict[str, float]:
    return {"seconds": seconds, "predicted": predicted, "ratio": predicted / seconds}


def _unit(name: str) -> str:
    """Of a constant of Costs."""
    if name == "flops_per_second":
        return "FLOP/s"
    return f"seconds per {UNITS[name.rsplit('_', 1)[1]]}"
