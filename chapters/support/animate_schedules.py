"""Animate how GPipe turns into 1F1B (chapter 7), and 1F1B into ZB-H1 (chapter 8), from simulated schedules.

The second is also drawn as one picture. In all its states each backward is drawn as its two halves. At first `I` and
`W` are one piece, `B`. Then every `W` follows its `I` at once, but the rank before no longer waits for it. In the end
`W` is put off, and fills the bubble.
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
SIMPLE, REAL = Durations(1, 1, 1), Durations(4, 5, 3)  # of chapter 7, and of chapter 8
UNITS = {
    SIMPLE: "F takes 1 unit of time, B takes 2",
    REAL: "F takes 4 units of time, I takes 5, W takes 3, and B takes 5 + 3 = 8",
}
STANDING, MOVING = 9, 8  # frames


@dataclass(frozen=True)
class State:
    """One schedule: start and end of each half, the kinds that its boxes have, and its idle time."""

    title: str
    times: Times
    kinds: dict[str, str]  # the colour of F, I and W: that of B while I and W are one piece
    idle: float
    alive: tuple[int, ...] = ()  # the most activations of each rank, if they are shown


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


def halves_of(slot: Slot, rank: int, durations: Durations) -> Times:
    """Return the times of a slot. Those of a B are the times of its I and its W."""
    kind, microbatch = slot.action.kind, slot.action.microbatch
    if kind != "B":
        return {(kind, microbatch, rank): (float(slot.start), float(slot.end))}
    middle = float(slot.start + durations.backward_input)
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
        line = simulate(schedule, REAL)
        times: Times = {}
        for rank, row in enumerate(line.ranks):
            for slot in row:
                times.update(halves_of(slot, rank, REAL))
        kinds = {"F": "F", "I": "B", "W": "B"} if schedule is one_piece else {"F": "F", "I": "I", "W": "W"}
        found.append(State(title, times, kinds, float(line.makespan * line.bubble_fraction)))
    return found


def states_of_chapter_7() -> list[State]:
    """Simulate GPipe and 1F1B."""
    found = []
    for name, title in (("gpipe", "GPipe: all forwards first"), ("1f1b", "1F1B: a backward after each forward")):
        line = simulate(make(name, RANKS, MICROBATCHES), SIMPLE)
        times = {
            key: span
            for rank, row in enumerate(line.ranks)
            for slot in row
            for key, span in halves_of(slot, rank, SIMPLE).items()
        }
        idle = float(line.makespan * line.bubble_fraction)
        found.append(State(title, times, {"F": "F", "I": "B", "W": "B"}, idle, tuple(line.peak_activations)))
    return found


def draw_state(axes: Axes, before: State, after: State, share: float, span: float) -> None:
    """Draw the boxes on their way: `share` of the way from one state to the next.

    The idle time, the activations alive and the end of a state are shown while its boxes rest.
    """
    shown = before if share == 0 else after
    gap = span / 600  # between two boxes
    for (kind, microbatch, rank), (start, end) in before.times.items():
        new_start, _ = after.times[kind, microbatch, rank]
        left = start + share * (new_start - start)
        colour = COLOURS[shown.kinds[kind]]
        is_piece = shown.kinds[kind] == "B"
        text = "" if is_piece else str(microbatch)
        if is_piece and kind == "I":
            middle = left + (before.times["W", microbatch, rank][1] - start) / 2
            place = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 4}
            axes.text(middle, rank + 0.5, str(microbatch), **place)
        less = gap
        if is_piece:
            less = 0.0 if kind == "I" else 3 * gap  # a piece has an edge of its own colour
        look = {"edgecolor": colour if is_piece else "white", "linewidth": 0.6, "zorder": 2 if kind == "W" else 3}
        box(axes, (left + gap / 2, rank + 0.05), (end - start - less, 0.9), colour, text, **look)
    title = shown.title
    if share == 0:
        title = f"{title}; each rank is idle for {shown.idle:g} units"
        axes.axvline(max(end for _, end in shown.times.values()), color=INK, linewidth=0.8, linestyle=":")
        for rank, count in enumerate(shown.alive):
            text = {"va": "center", "fontsize": 8.5, "color": INK}
            axes.text(1.015 * span, rank + 0.5, f"{count} alive", **text)
    axes.set(xlim=(-0.01 * span, (1.09 if shown.alive else 1.01) * span), ylim=(RANKS, -0.05), xticks=[])
    axes.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)], fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)


def legend(figure: Picture, kinds: str = "FBIW") -> None:
    """Name the colours of the kinds below the axes."""
    legend_outside(figure, [Patch(facecolor=COLOURS[kind], label=KINDS[kind]) for kind in kinds], "lower center")


def plot_states() -> Picture:
    """Draw the three states below one another: the animation for paper."""
    figure = picture(7.0, 5.2)
    found = states()
    span = max(end for _, end in found[0].times.values())
    panels = figure.subplots(len(found), 1)
    for axes, state in zip(panels, found, strict=True):
        draw_state(axes, state, state, 0.0, span)
    panels[-1].set_xlabel(UNITS[REAL], fontsize=9, color=INK)
    legend(figure)
    return figure


def animate_zero_bubble() -> tuple[Picture, FuncAnimation]:
    """Animate how 1F1B turns into ZB-H1."""
    return _animate(states(), REAL, "FBIW")


def animate_one_f_one_b() -> tuple[Picture, FuncAnimation]:
    """Animate how GPipe turns into 1F1B."""
    return _animate(states_of_chapter_7(), SIMPLE, "FB")


def _animate(found: list[State], durations: Durations, kinds: str) -> tuple[Picture, FuncAnimation]:
    """Animate states, one after the other."""
    figure = picture(7.0, 2.4)
    axes = figure.subplots()
    span = max(end for _, end in found[0].times.values())
    legend(figure, kinds)
    frames = STANDING + (STANDING + MOVING) * (len(found) - 1)

    def draw(frame: int) -> None:
        axes.clear()
        number, step = divmod(frame, STANDING + MOVING)
        following = found[min(number + 1, len(found) - 1)]
        draw_state(axes, found[number], following, max(0, step - STANDING + 1) / (MOVING + 1), span)
        axes.set_xlabel(UNITS[durations], fontsize=9, color=INK)

    return figure, FuncAnimation(figure, draw, frames=frames)
