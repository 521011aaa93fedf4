"""Animated collectives, from the messages of real runs: python -m chapters.support.animate DIRECTORY.

Every rank is a thread, and every message that it sends is recorded with its values. An element's value tells its chunk
and the ranks whose contributions it sums, so that nothing about an algorithm is assumed here. The same command writes
the animations of chapter 5 (ch05/animate_units.py), 8 (animate_schedules.py) and 11 (ch11/animate_ring.py).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.patches import Rectangle

from chapters.support.animate_schedules import animate_zero_bubble
from minipar.comm import Communicator, run_local
from minipar.comm.threads import ThreadTransport
from visualize.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, VERMILION, YELLOW, Picture, picture

CHUNK = 1 << 20  # the value of chunk c's elements has c + 1 times this for each contribution
COLOURS = (BLUE, ORANGE, SKY, GREEN, PURPLE, YELLOW, VERMILION, INK)
MOVING, RESTING = 6, 4  # frames in which the messages of a round move, and in which the result stands
GALLERY = {
    "ring_all_reduce": ("all_reduce", "ring", "Ring all-reduce: a reduce-scatter, then an all-gather"),
    "recursive_doubling": ("all_reduce", "recursive_doubling", "All-reduce by recursive doubling"),
    "reduce_scatter": ("reduce_scatter", "recursive_halving", "Reduce-scatter by recursive halving"),
}


@dataclass(frozen=True)
class Sent:
    """A message: in its round, the sets of contributions (bits of ranks) that it carries, by chunk."""

    round: int
    source: int
    dest: int
    chunks: dict[int, int]


def messages_of(ranks: int, run: Callable[[Communicator], Any]) -> tuple[list[tuple[int, int, np.ndarray]], list[Any]]:
    """Run a function on `ranks` threads. Return its messages (source, dest, values), and what each rank returned."""
    log: list[tuple[int, int, np.ndarray]] = []
    isend = ThreadTransport.isend

    def recording(transport: ThreadTransport, array: np.ndarray, dest: int, tag: int, owner: Any) -> Any:
        log.append((transport.ranks[transport.rank], transport.ranks[dest], array.copy()))  # also in a group
        return isend(transport, array, dest, tag, owner)

    with patch.object(ThreadTransport, "isend", recording):
        results = run_local(ranks, run)
    return log, results


def record(op: str, algorithm: str, ranks: int) -> list[Sent]:
    """Run a collective on `ranks` threads, one element for each chunk. Return its messages, round by round.

    A rank sends one message in each round.
    """

    def run(comm: Communicator) -> None:
        x = (np.arange(ranks, dtype=np.int64) + 1) * CHUNK + (1 << comm.rank)
        getattr(comm, op)(x, algorithm=algorithm)

    log, _ = messages_of(ranks, run)
    messages, rounds = [], [0] * ranks
    for source, dest, values in log:
        chunks = {}
        for value in values.tolist():
            high, ranks_added = divmod(value, CHUNK)
            chunks[high // ranks_added.bit_count() - 1] = ranks_added
        messages.append(Sent(rounds[source], source, dest, chunks))
        rounds[source] += 1
    return sorted(messages, key=lambda message: (message.round, message.source))


def states(messages: list[Sent], ranks: int) -> list[list[list[int]]]:
    """Return, before the first round and after each one, the contributions that [rank][chunk] sums."""
    now = [[1 << rank for _ in range(ranks)] for rank in range(ranks)]
    history = [[list(row) for row in now]]
    for number in range(messages[-1].round + 1):
        before = history[-1]
        for message in messages:
            if message.round == number:
                for chunk, carried in message.chunks.items():
                    own = before[message.dest][chunk]
                    now[message.dest][chunk] = carried if carried & own else carried | own
        history.append([list(row) for row in now])
    return history


def animate(op: str, algorithm: str, title: str, ranks: int = 4) -> tuple[Picture, FuncAnimation]:
    """Draw the arrays of all ranks, with a colour for each rank's contribution, and the messages on their way."""
    messages = record(op, algorithm, ranks)
    history = states(messages, ranks)
    rounds = len(history) - 1
    figure = picture(5.6, 0.62 * ranks + 1.2)
    axes = figure.subplots()

    def cell(x: float, y: float, width: float, contributions: int, edge: str, above: int) -> None:
        axes.add_patch(Rectangle((x, y), width, 0.72, facecolor=PAPER, edgecolor=edge, linewidth=1.2, zorder=above))
        for rank in range(ranks):
            if contributions >> rank & 1:
                place = (x + 0.04 + rank * (width - 0.08) / ranks, y + 0.1)
                size = ((width - 0.16) / ranks, 0.52)
                axes.add_patch(Rectangle(place, *size, facecolor=COLOURS[rank % 8], zorder=above + 1))

    def draw(frame: int) -> None:
        axes.clear()
        number, step = divmod(frame, MOVING + RESTING)
        share = min(step / (MOVING - 1), 1.0) if number < rounds else 1.0
        finished = number + 1 if share == 1.0 else number
        shown = history[min(finished, rounds)]
        for rank in range(ranks):
            for chunk in range(ranks):
                cell(chunk, -rank, 0.86, shown[rank][chunk], INK, 2)
        for message in messages:
            if message.round == number and share < 1.0:
                down = message.dest > message.source  # down on the right, up on the left: pairs exchange
                for chunk, carried in message.chunks.items():
                    y = -message.source + (message.source - message.dest) * share
                    cell(chunk + 0.43 * down, y, 0.43, carried, VERMILION, 4)
        axes.set_xlim(-0.1, ranks)
        axes.set_ylim(-ranks + 0.9, 0.85)
        axes.set_yticks([0.36 - rank for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
        axes.set_xticks([chunk + 0.43 for chunk in range(ranks)], [f"chunk {chunk}" for chunk in range(ranks)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{title}\nround {min(number + 1, rounds)} of {rounds}", fontsize=10)

    return figure, FuncAnimation(figure, draw, frames=rounds * (MOVING + RESTING) + 8)


def main(directory: str) -> None:
    """Write the animations of the gallery."""
    from chapters.support.ch05 import animate_units
    from chapters.support.ch11 import animate_ring

    animations = {name: animate(op, algorithm, title)[1] for name, (op, algorithm, title) in GALLERY.items()}
    animations["zero_bubble"] = animate_zero_bubble()[1]
    animations["zero3_units"] = animate_units.animate(animate_units.record())
    animations["ring_attention"] = animate_ring.animate(animate_ring.record())
    for name, animation in animations.items():
        path = Path(directory) / f"{name}.gif"
        animation.save(path, writer=PillowWriter(fps=8), dpi=80)
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
