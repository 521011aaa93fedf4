"""Animated ring attention, from a run: whose keys and values are where, and which blocks of the table are computed.

Every rank is a thread. The values of rank r's tokens are 1 in column r and 0 elsewhere. So a message tells whose keys
and values it carries, and the output of a query tells whose keys it has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from chapters.support.animate import messages_of
from chapters.support.draw import RANKS, box
from minipar.comm import Communicator
from minipar.more.context.context_parallel import RingAttention
from minipar.more.context.token_order import ContextParallel
from visualize.style import GREY, INK, PAPER, Picture, ink_on, picture

TOKENS = 2  # of each rank
MOVING, RESTING = 6, 4  # frames of a step in which blocks travel, and in which they have arrived
Attention = Callable[[Communicator, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Journey:
    """A run: `owners[step][rank]`, whose block a rank has, and `seen[rank][owner]`, whose keys its queries saw."""

    owners: tuple[tuple[int, ...], ...]
    seen: tuple[tuple[bool, ...], ...]


def library_ring(comm: Communicator, q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Call the library's ring with one sample and one head: q (T/c, h/a), keys and values kv (2, T/c, h/a)."""
    ring = RingAttention(ContextParallel(comm, "contiguous"))
    keys, values = kv[:, None, None, None]  # (1, 1, 1, T/c, h/a) each
    out, lse = ring.forward(q[None, None, None], keys, values, scale=1.0)
    return out[0, 0, 0], lse[0, 0, 0]


def record(attention: Attention = library_ring, ranks: int = 4) -> Journey:
    """Run ring attention on `ranks` threads, with the tokens in contiguous order."""

    def run(comm: Communicator) -> np.ndarray:
        keys, values = np.zeros((2, TOKENS, ranks))
        values[:, comm.rank] = 1
        out, _ = attention(comm, np.zeros((TOKENS, ranks)), np.stack([keys, values]))
        return out

    log, outputs = messages_of(ranks, run)
    owners = [list(range(ranks))]
    sent = [0] * ranks
    for source, dest, block in log:
        sent[source] += 1
        if len(owners) == sent[source]:
            owners.append([-1] * ranks)
        values = block.reshape(2, TOKENS, ranks)[1]
        owners[sent[source]][dest] = int(values[0].argmax())
    seen = [tuple(bool(weight > 0) for weight in out[-1]) for out in outputs]
    return Journey(tuple(map(tuple, owners)), tuple(seen))


def record_both(attention: Attention) -> Journey:
    """Record this function, and check that the library's ring does the same."""
    journey = record(attention)
    assert journey == record()
    return journey


def draw_block(axes: Axes, rank: int, owner: int, journey: Journey, is_now: bool) -> None:
    """Draw the block of rank's queries and owner's keys, which has been computed or is being computed now."""
    x, y = owner, -rank
    if not journey.seen[rank][owner]:
        text = "waits" if is_now else "skipped"
        axes.text(x + 0.43, y + 0.36, text, ha="center", va="center", fontsize=6.5, color=INK)
    elif owner == rank:
        corners = [(x, y), (x, y + 0.72), (x + 0.86, y)]
        axes.add_patch(Polygon(corners, facecolor=RANKS[owner], zorder=3))
    else:
        axes.add_patch(Rectangle((x, y), 0.86, 0.72, facecolor=RANKS[owner], zorder=3))
    if is_now:
        look = {"fill": False, "edgecolor": INK, "linewidth": 2.0, "zorder": 5}
        axes.add_patch(Rectangle((x, y), 0.86, 0.72, **look))


def draw_step(axes: Axes, journey: Journey, step: int, share: float, size: float = 8) -> None:
    """Draw a step: the table of scores, the block that each rank has, and, at `share` of their way, the messages."""
    ranks = len(journey.owners)
    slot = ranks + 0.5  # where the block lies that a rank has
    for rank in range(ranks):
        for owner in range(ranks):
            axes.add_patch(Rectangle((owner, -rank), 0.86, 0.72, facecolor=PAPER, edgecolor=GREY, linewidth=0.5))
        for past in range(step + 1):
            draw_block(axes, rank, journey.owners[past][rank], journey, is_now=past == step)
        owner = journey.owners[step][rank]
        box(axes, (slot, -rank), (0.86, 0.72), RANKS[owner], str(owner), fontsize=size)
        if step + 1 < ranks and share < 1.0:
            dest = (rank + 1) % ranks
            assert journey.owners[step + 1][dest] == owner
            is_back = dest < rank  # from the last rank to the first one
            corner = (slot + (2.0 if is_back else 1.0), -rank + (rank - dest) * share)
            look = {"edgecolor": INK, "linewidth": 1.8, "zorder": 6}
            box(axes, corner, (0.86, 0.72), RANKS[owner], "", **look)
            middle = (corner[0] + 0.43, corner[1] + 0.36)
            axes.text(
                *middle, str(owner), ha="center", va="center", fontsize=size, color=ink_on(RANKS[owner]), zorder=7
            )
    axes.set_yticks([0.36 - rank for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=size)
    axes.set_xlim(-0.1, slot + 3.0)
    axes.set_ylim(-ranks + 0.9, 0.85)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def animate(journey: Journey) -> FuncAnimation:
    """Draw the ring step by step: each rank computes with the block that it has, while the blocks travel."""
    ranks = len(journey.owners)
    figure = picture(6.4, 0.62 * ranks + 1.2)
    axes = figure.subplots()
    names = [*(f"keys of {owner}" for owner in range(ranks)), "K and V of", "to the next"]
    places = [*(owner + 0.43 for owner in range(ranks)), ranks + 0.93, ranks + 2.43]

    def draw(frame: int) -> None:
        axes.clear()
        step = min(frame // (MOVING + RESTING), ranks - 1)
        share = min((frame - step * (MOVING + RESTING)) / MOVING, 1.0)
        draw_step(axes, journey, step, share)
        axes.set_xticks(places, names, fontsize=8)
        axes.set_title(f"Ring attention: queries stay, keys and values travel\nstep {step}", fontsize=10)

    return FuncAnimation(figure, draw, frames=ranks * (MOVING + RESTING) + 4)


def still(journey: Journey) -> Picture:
    """Draw the same for print: one panel for each step, with the messages half on their way."""
    ranks = len(journey.owners)
    figure = picture(7.6, 2 * 1.75)
    for step, axes in enumerate(figure.subplots(2, (ranks + 1) // 2).flat):
        if step >= ranks:
            axes.set_axis_off()
            continue
        draw_step(axes, journey, step, share=0.5, size=7.5)
        places = [*(owner + 0.43 for owner in range(ranks)), ranks + 0.93]
        axes.set_xticks(places, [*map(str, range(ranks)), "here"], fontsize=7.5)
        axes.set_title(f"step {step}", fontsize=9, loc="left")
    figure.supxlabel(
        "columns: keys of each rank. Black frames: what is computed now, and blocks on their way", fontsize=8
    )
    return figure
