"""Animated collectives, from the messages of real runs: python -m chapters.support.animate DIRECTORY.

Every rank is a thread, and every message that it sends is recorded with its values. An element's value tells its chunk
and the ranks whose contributions it sums, so that nothing about an algorithm is assumed here. The same command writes
the animations of chapter 5 (ch05/animate_units.py), 7 and 8 (animate_schedules.py) and 11 (ch11/animate_ring.py).
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from chapters.support.animate_schedules import animate_one_f_one_b, animate_zero_bubble
from minipar.comm import Communicator, run_local
from minipar.comm.threads import ThreadTransport
from visualize.style import BLUE, GREY, INK, VERMILION, Picture, at_lightness, ink_on, picture

CHUNK = 1 << 20  # the value of chunk c's elements has c + 1 times this for each contribution
MOVING, RESTING = 10, 5  # frames in which the messages of a round move, and in which the result stands
FRAMES_PER_SECOND, DPI, COLOURS, NEARLY_WHITE = 8, 120, 48, 245
ACROSS, UP = 2.6, 1.75  # half of the width and half of the height of the ring on which the ranks stand
WIDTH, HEIGHT = 0.56, 0.5  # of a chunk
AROUND = 0.6  # how far a message is beside the straight line, so that two that are exchanged seldom meet
NOTE = "a row: the chunks of a rank. Digits: the ranks whose contributions a chunk sums; Σ: all of them"
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


def place_of(rank: int, chunk: int, ranks: int) -> tuple[float, float]:
    """Return the lower left corner of a chunk, on a ring of ranks that begins above and goes clockwise."""
    angle = math.pi / 2 - 2 * math.pi * rank / ranks
    x, y = ACROSS * math.cos(angle), UP * math.sin(angle)
    return x + (chunk - ranks / 2) * WIDTH, y - HEIGHT / 2


def draw_chunk(axes: Axes, corner: tuple[float, float], contributions: int, ranks: int, edge: str, above: int) -> None:
    """Draw a chunk with the ranks whose contributions it sums: the darker, the more. `above` is its place in depth."""
    members = [str(rank) for rank in range(ranks) if contributions >> rank & 1]
    is_sum = len(members) == ranks
    face = at_lightness(BLUE, 35 if is_sum else 95 - 40 * len(members) / ranks)
    wide = 1.0 if edge == "white" else 1.8
    axes.add_patch(Rectangle(corner, WIDTH, HEIGHT, facecolor=face, edgecolor=edge, linewidth=wide, zorder=above))
    x, y = corner[0] + WIDTH / 2, corner[1] + HEIGHT / 2
    look = {"ha": "center", "va": "center", "fontsize": 9, "color": ink_on(face), "zorder": above + 1}
    axes.text(x, y, "Σ" if is_sum else "".join(members), **look)


def on_its_way(message: Sent, chunk: int, share: float, ranks: int) -> tuple[float, float]:
    """Return where a chunk of a message is after a share of its way, on an arc to the left of the straight line."""
    start, end = place_of(message.source, chunk, ranks), place_of(message.dest, chunk, ranks)
    along = end[0] - start[0], end[1] - start[1]
    beside = AROUND * math.sin(math.pi * share) / math.hypot(*along)
    return start[0] + share * along[0] - beside * along[1], start[1] + share * along[1] + beside * along[0]


def draw_ranks(axes: Axes, ranks: int) -> None:
    """Draw the ring and the ranks' names, without axes."""
    angles = np.linspace(0, 2 * math.pi, 200)
    axes.plot(ACROSS * np.cos(angles), UP * np.sin(angles), color=GREY, linewidth=1, linestyle=":", zorder=1)
    for rank in range(ranks):
        x, y = place_of(rank, 0, ranks)
        axes.text(x, y + HEIGHT + 0.08, f"rank {rank}", fontsize=9, color=INK, zorder=3)
    wide = ACROSS + ranks * WIDTH / 2 + 0.1
    axes.set(xlim=(-wide, wide), ylim=(-UP - HEIGHT, UP + HEIGHT + 0.15))
    axes.set_axis_off()


def animate(op: str, algorithm: str, title: str, ranks: int = 4) -> tuple[Picture, FuncAnimation]:
    """Draw the ranks on a ring, what each chunk sums, and the messages on their way from rank to rank."""
    messages = record(op, algorithm, ranks)
    history = states(messages, ranks)
    rounds = len(history) - 1
    figure = picture(6.4, 4.5)
    figure.supxlabel(NOTE, fontsize=8)
    axes = figure.subplots()

    def draw(frame: int) -> None:
        axes.clear()
        number, step = divmod(frame, MOVING + RESTING)
        share = min(step / (MOVING - 1), 1.0) if number < rounds else 1.0
        finished = number + 1 if share == 1.0 else number
        shown = history[min(finished, rounds)]
        draw_ranks(axes, ranks)
        for rank in range(ranks):
            for chunk in range(ranks):
                draw_chunk(axes, place_of(rank, chunk, ranks), shown[rank][chunk], ranks, "white", 2)
        moving = [message for message in messages if message.round == number and share < 1.0]
        for place, message in enumerate(moving):
            for chunk, carried in message.chunks.items():
                draw_chunk(axes, on_its_way(message, chunk, share, ranks), carried, ranks, VERMILION, 4 + 2 * place)
        sent = sum(len(message.chunks) for message in messages if message.source == 0 and message.round < finished)
        words = f"round {min(number + 1, rounds)} of {rounds}; each rank has sent {sent} chunk{'s' * (sent != 1)}"
        axes.set_title(f"{title}\n{words}", fontsize=10)

    return figure, FuncAnimation(figure, draw, frames=rounds * (MOVING + RESTING) + 8)


class FewColours(PillowWriter):
    """Writes a GIF whose frames share one palette, without dots that mix colours: a fraction of the bytes."""

    def finish(self) -> None:
        """Write the frames."""
        some = self._frames[:: max(1, len(self._frames) // 8)]
        width, height = some[0].size
        sheet = Image.new("RGB", (width, height * len(some)))
        for place, frame in enumerate(some):
            sheet.paste(frame, (0, height * place))
        palette = sheet.quantize(COLOURS, Image.Quantize.MEDIANCUT)
        palette.putpalette([255 if value > NEARLY_WHITE else value for value in palette.getpalette()])
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self._frames]
        duration = int(1000 / self.fps)
        frames[0].save(self.outfile, save_all=True, append_images=frames[1:], duration=duration, loop=0, optimize=True)


def main(directory: str) -> None:
    """Write the animations of the gallery."""
    from chapters.support.ch05 import animate_units
    from chapters.support.ch11 import animate_ring

    animations = {name: animate(op, algorithm, title)[1] for name, (op, algorithm, title) in GALLERY.items()}
    animations["gpipe_1f1b"] = animate_one_f_one_b()[1]
    animations["zero_bubble"] = animate_zero_bubble()[1]
    animations["zero3_units"] = animate_units.animate(animate_units.record())
    animations["ring_attention"] = animate_ring.animate(animate_ring.record())
    for name, animation in animations.items():
        path = Path(directory) / f"{name}.gif"
        animation.save(path, writer=FewColours(fps=FRAMES_PER_SECOND), dpi=DPI)
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
