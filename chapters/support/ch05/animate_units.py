"""Animated stage 3, from a step of the library: units are gathered, used and freed, and gradients leave.

Every rank is a thread. The wrapper's methods are watched, and after each event the parameters themselves tell whether
they are there: those of a unit that is away are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minipar.autograd import Tensor, gelu
from minipar.comm import Communicator, run_local
from minipar.nn import Module, Parameter
from minipar.nn.module import Segment
from minipar.parallel.fsdp import FullyShardedDataParallel, Unit
from visualize.style import COLOURS, GREY, INK, VERMILION, Picture, picture

UNITS, RANKS, WIDTH = 3, 4, 8  # a unit is one matrix of WIDTH * WIDTH elements
FRAMES = {"gather": 7, "forward": 3, "free": 2, "backward": 3, "reduce": 7}
MOVING = 5  # frames of a gather or a reduce-scatter in which its messages move
TITLES = {
    "gather": "all-gather unit {unit}",
    "forward": "forward of unit {unit}",
    "free": "free unit {unit}",
    "backward": "backward of unit {unit}",
    "reduce": "reduce-scatter the gradient of unit {unit}",
}


@dataclass(frozen=True)
class Event:
    """An event on a rank: what happened to which unit, and which units have all of their parameters afterwards."""

    kind: str
    unit: int
    whole: tuple[bool, ...]


class Layers(Module):
    """A model of one matrix per unit, that says when a unit's forward runs."""

    def __init__(self, watch: Any) -> None:
        self.matrices = [Parameter(np.full((WIDTH, WIDTH), 0.1)) for _ in range(UNITS)]
        self.watch = watch
        self.segments = [
            Segment(f"layer {i}", partial(self.layer, i), [matrix], is_last=i == UNITS - 1)
            for i, matrix in enumerate(self.matrices)
        ]

    def layer(self, i: int, x: Tensor) -> Tensor:
        self.watch("forward", i)
        return gelu(x @ self.matrices[i])

    def loss_sum(self, x: Any, targets: Any) -> Tensor:
        for segment in self.segments:
            x = segment.run(x)
        return (x * x).sum() * 0.5


class Watched(FullyShardedDataParallel):
    """Stage 3 that says when it gathers, frees and reduces a unit, and when a unit's backward begins."""

    def __init__(self, watch: Any, model: Module, comm: Communicator) -> None:
        self.watch = watch
        super().__init__(model, comm)
        self.prefetch = False
        for unit in self.buckets:
            unit.wait_for_unshard = partial(self.wait_for_unshard, unit)  # type: ignore[method-assign]
            unit.reshard = partial(self.reshard, unit)  # type: ignore[method-assign]

    def number(self, unit: Any) -> int:
        return self.buckets[::-1].index(unit)

    def wait_for_unshard(self, unit: Unit) -> None:
        is_away = unit.gathering is None or np.isnan(unit.parameters[0].data).all()
        Unit.wait_for_unshard(unit)
        if is_away:
            self.watch("gather", self.number(unit))

    def reshard(self, unit: Unit) -> None:
        is_whole = unit.gathering is not None
        Unit.reshard(unit)
        if is_whole:
            self.watch("free", self.number(unit))

    def pre_backward(self, segment: Any, units: Any, preceding: Any) -> None:
        super().pre_backward(segment, units, preceding)
        for unit in units:
            self.watch("backward", self.number(unit))

    def reduce(self, unit: Any) -> None:
        super().reduce(unit)
        self.works[-1].wait()  # the library waits later, and computes meanwhile
        self.watch("reduce", self.number(unit))


def record() -> list[Event]:
    """Train one step at stage 3, without prefetch. Return the events, which are the same on every rank."""

    def run(comm: Communicator) -> list[Event]:
        events: list[Event] = []

        def watch(kind: str, unit: int) -> None:
            whole = tuple(not np.isnan(matrix.data).any() for matrix in model.matrices)
            events.append(Event(kind, unit, whole))

        model = Layers(watch)
        wrapper = Watched(watch, model, comm)
        samples = np.random.default_rng(comm.rank).normal(size=(2, WIDTH))
        wrapper.loss(samples, samples).backward()
        return events

    found = run_local(RANKS, run)
    assert all(events == found[0] for events in found)
    return list(found[0])


def draw_moment(axes: Axes, events: list[Event], number: int, share: float, size: float = 8) -> None:
    """Draw what every rank holds of every unit while event `number` happens, and its messages at `share` of their way.

    With a share of 0 an arrow in each chunk's column says where the messages go.
    """
    event = events[number]
    before = events[number - 1].whole if number > 0 else (False,) * UNITS
    done = {e.unit for e in events[:number] if e.kind == "reduce"}  # these gradients have been summed
    for rank in range(RANKS):
        for unit in range(UNITS):
            is_moving = unit == event.unit and share < 1.0
            is_whole = before[unit] if event.kind == "gather" and is_moving else event.whole[unit]
            has_gradient = unit == event.unit and (event.kind == "backward" or (event.kind == "reduce" and is_moving))
            is_summed = unit in done or (event.kind == "reduce" and unit == event.unit and not is_moving)
            for chunk in range(RANKS):
                has_parameters = is_whole or chunk == rank
                draw_chunk(axes, rank, unit, chunk, "parameters", has_parameters)
                draw_chunk(axes, rank, unit, chunk, "gradients", has_gradient or (is_summed and chunk == rank))
        if event.kind in ("forward", "backward"):
            look = {"fill": False, "edgecolor": VERMILION, "linewidth": 2.0, "zorder": 6}
            axes.add_patch(Rectangle((event.unit - 0.03, -rank - 0.03), 0.92, 0.78, **look))
    if event.kind in ("gather", "reduce") and share == 0.0:
        draw_arrows(axes, event)
    elif event.kind in ("gather", "reduce") and share < 1.0:
        draw_messages(axes, event, share)
    axes.set_xticks([unit + 0.43 for unit in range(UNITS)], [f"unit {unit}" for unit in range(UNITS)], fontsize=size)
    axes.set_yticks([0.36 - rank for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)], fontsize=size)
    axes.set_xlim(-0.1, UNITS)
    axes.set_ylim(-RANKS + 0.85, 0.85)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def place_of(rank: float, unit: int, chunk: int, kind: str) -> tuple[float, float]:
    """Return the corner of a chunk: parameters lie above gradients."""
    return unit + chunk * 0.86 / RANKS, -rank + (0.38 if kind == "parameters" else 0.0)


def draw_chunk(axes: Axes, rank: int, unit: int, chunk: int, kind: str, is_here: bool) -> None:
    """Draw the place of a chunk, filled if the rank has it."""
    colour = COLOURS[kind] if is_here else "white"
    look = {"facecolor": colour, "edgecolor": GREY, "linewidth": 0.5}
    axes.add_patch(Rectangle(place_of(rank, unit, chunk, kind), 0.86 / RANKS, 0.34, **look))


def draw_messages(axes: Axes, event: Event, share: float) -> None:
    """Draw the chunks of a collective on their way: from its owner to all, or from all to its owner."""
    kind = "parameters" if event.kind == "gather" else "gradients"
    look = {"facecolor": COLOURS[kind], "edgecolor": VERMILION, "linewidth": 1.4, "zorder": 5}
    for chunk in range(RANKS):  # chunk r belongs to rank r
        for other in range(RANKS):
            if other != chunk:
                source, dest = (chunk, other) if kind == "parameters" else (other, chunk)
                place = place_of(source + (dest - source) * share, event.unit, chunk, kind)
                axes.add_patch(Rectangle(place, 0.86 / RANKS, 0.34, **look))


def draw_arrows(axes: Axes, event: Event) -> None:
    """Draw where the messages of a collective go: for each chunk from its owner to all, or from all to its owner."""
    kind = "parameters" if event.kind == "gather" else "gradients"
    for chunk in range(RANKS):
        left, bottom = place_of(chunk, event.unit, chunk, kind)
        owner = Rectangle((left, bottom), 0.86 / RANKS, 0.34, fill=False, edgecolor=VERMILION, linewidth=1.4, zorder=5)
        axes.add_patch(owner)
        for other in {0, RANKS - 1} - {chunk}:
            y = place_of(other, event.unit, chunk, kind)[1]
            near = bottom if other > chunk else bottom + 0.34
            middle = y + 0.17
            start, end = (near, middle) if kind == "parameters" else (middle, near)
            x = left + 0.43 / RANKS
            look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x, end), (x, start), arrowprops=look | {"mutation_scale": 9}, zorder=6)


def animate(events: list[Event]) -> FuncAnimation:
    """Draw a step of stage 3, event by event."""
    figure = picture(5.6, 0.62 * RANKS + 1.2)
    axes = figure.subplots()
    frames = [(number, share) for number, event in enumerate(events) for share in shares(event)]
    frames += frames[-1:] * 6

    def draw(frame: int) -> None:
        axes.clear()
        number, share = frames[frame]
        draw_moment(axes, events, number, share)
        title = TITLES[events[number].kind].format(unit=events[number].unit)
        axes.set_title(f"ZeRO stage 3: parameters (blue) and gradients (orange)\n{title}", fontsize=10)

    return FuncAnimation(figure, draw, frames=len(frames))


def shares(event: Event) -> list[float]:
    """Return for each frame of an event the share of it that is over."""
    return [min((frame + 1) / MOVING, 1.0) for frame in range(FRAMES[event.kind])]


def still(events: list[Event], unit: int = 1) -> Picture:
    """Draw the same for print: the events of one unit, in forward and in backward."""
    own = [number for number, event in enumerate(events) if event.unit == unit]
    half = [number for number in own if number <= own[2]], [number for number in own if number > own[2]]
    columns = max(map(len, half))
    figure = picture(7.6, 3.7)
    grid = figure.subplots(2, columns)
    for row, numbers in zip(grid, half, strict=True):
        for axes in row[len(numbers) :]:
            axes.set_axis_off()
        for place, (axes, number) in enumerate(zip(row, numbers, strict=False)):
            draw_moment(axes, events, number, share=0.0, size=7)
            if place > 0:
                axes.set_yticks([])
            axes.set_title(events[number].kind.replace("reduce", "reduce-scatter"), fontsize=9, loc="left")
    label = (
        f"unit {unit} in forward (above) and in backward. Blue: parameters, orange: gradients.\n"
        "Red: computes, or owns the chunk. A gather goes from the owner to all, a reduce-scatter from all to the owner"
    )
    figure.supxlabel(label, fontsize=8)
    return figure
