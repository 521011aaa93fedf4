"""Animate how 1F1B turns into ZB-H1, and draw the same as one picture, from simulated schedules (chapter 8).

In all states each backward is drawn as its two halves. At first `I` and `W` are one piece, `B`. Then every `W` follows
its `I` at once, but the rank before no longer waits for it. In the end `W` is put off, and fills the bubble.
"""

from dataclasses import dataclass

from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from chapters.support.draw import box, legend_outside
from minipar.parallel.pipeline.actions import Action, Durations, Schedule, Slot, simulate
from minipar.parallel.pipeline.schedules import make
from visualize.boxes import KINDS
from visualize.style import COLOURS, INK, Picture, picture

Place = tuple[str, int, int]  # kind (F, I or W), microbatch, rank
Times = dict[Place, tuple[float, float]]
RANKS, MICROBATCHES = 4, 7
DURATIONS = Durations(4, 5, 3)
STANDING, MOVING = 9, 8  # frames


@dataclass(frozen=True)
class State:
    """One schedule: start and end of each half, the kinds that its boxes have, and its idle time."""

    title: str
    times: Times
    kinds: dict[str, str]  # the colour of F, I and W: that of B while I and W are one piece
    idle: float


def split(schedule: Schedule) -> Schedule:
    """Return the schedule with I and W in the place of each B."""
    lists = []
    for actions in schedule.ranks:
        halves = []
        for action in actions:
            kinds = "IW" if action.kind == "B" else action.kind
            halves += [Action(action.stage, kind, action.microbatch) for kind in kinds]
        lists.append(halves)
    return Schedule.of("1f1b, split", lists)


def halves_of(slot: Slot, rank: int) -> Times:
    """Return the times of a slot. Those of a B are the times of its I and its W."""
    kind, microbatch = slot.action.kind, slot.action.microbatch
    if kind != "B":
        return {(kind, microbatch, rank): (float(slot.start), float(slot.end))}
    middle = float(slot.start + DURATIONS.backward_input)
    return {("I", microbatch, rank): (float(slot.start), middle), ("W", microbatch, rank): (middle, float(slot.end))}


def states() -> list[State]:
    """Simulate the three schedules."""
    one_piece = make("1f1b", RANKS, MICROBATCHES)
    schedules = {
        "1F1B: the rank before waits for all of B": one_piece,
        "I and W in turn: it waits for I only": split(one_piece),
        "ZB-H1: on rank r, W waits for r more microbatches": make("zb-h1", RANKS, MICROBATCHES),
    }
    found = []
    for title, schedule in schedules.items():
        line = simulate(schedule, DURATIONS)
        times: Times = {}
        for rank, row in enumerate(line.ranks):
            for slot in row:
                times.update(halves_of(slot, rank))
        kinds = {"F": "F", "I": "B", "W": "B"} if schedule is one_piece else {"F": "F", "I": "I", "W": "W"}
        found.append(State(title, times, kinds, float(line.makespan * line.bubble_fraction)))
    return found


def draw_state(axes: Axes, before: State, after: State, share: float, span: float) -> None:
    """Draw the boxes on their way: `share` of the way from one state to the next."""
    shown = before if share == 0 else after
    for (kind, microbatch, rank), (start, end) in before.times.items():
        new_start, _ = after.times[kind, microbatch, rank]
        left = start + share * (new_start - start)
        colour = COLOURS[shown.kinds[kind]]
        is_piece = shown.kinds[kind] == "B"
        text = "" if is_piece else str(microbatch)
        if is_piece and kind == "I":
            middle = left + (DURATIONS.backward_input + DURATIONS.backward_weight) / 2
            place = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 4}
            axes.text(middle, rank + 0.5, str(microbatch), **place)
        gap = 0.0 if is_piece else 0.2
        look = {"edgecolor": colour if is_piece else "white", "linewidth": 0.6, "zorder": 2 if kind == "W" else 3}
        box(axes, (left + 0.1, rank + 0.05), (end - start - gap, 0.9), colour, text, **look)
    axes.axvline(max(end for _, end in shown.times.values()), color=INK, linewidth=0.8, linestyle=":")
    axes.set(xlim=(-0.01 * span, 1.01 * span), ylim=(RANKS, -0.05), xticks=[])
    axes.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)], fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{shown.title}; each rank is idle for {shown.idle:g}", loc="left", fontsize=9.5, color=INK)


def legend(figure: Picture) -> None:
    """Name the colours of F, B, I and W below the axes."""
    legend_outside(figure, [Patch(facecolor=COLOURS[kind], label=KINDS[kind]) for kind in "FBIW"], "lower center")


def plot_states() -> Picture:
    """Draw the three states below one another: the animation for paper."""
    figure = picture(7.0, 5.0)
    found = states()
    span = max(end for _, end in found[0].times.values())
    for axes, state in zip(figure.subplots(len(found), 1), found, strict=True):
        draw_state(axes, state, state, 0.0, span)
    legend(figure)
    return figure


def animate_zero_bubble() -> tuple[Picture, FuncAnimation]:
    """Animate the three states, one after the other."""
    figure = picture(7.0, 2.2)
    axes = figure.subplots()
    found = states()
    span = max(end for _, end in found[0].times.values())
    legend(figure)
    frames = STANDING + (STANDING + MOVING) * (len(found) - 1)

    def draw(frame: int) -> None:
        axes.clear()
        number, step = divmod(frame, STANDING + MOVING)
        following = found[min(number + 1, len(found) - 1)]
        draw_state(axes, found[number], following, max(0, step - STANDING + 1) / (MOVING + 1), span)

    return figure, FuncAnimation(figure, draw, frames=frames)
