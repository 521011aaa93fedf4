"""The boxes of a pipeline picture: their colours, their marks, and a number in each that can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule, parse_action

from .style import COLOURS, GREY, PAPER, at_lightness, ink_on

KINDS = {"F": "F forward", "B": "B backward", "I": "I backward, input", "W": "W backward, weights"}
# Lightness of a rank's first and last stage; F and B alone leave more space. Stages are also told apart by a bar.
SHADES = {"F": (32, 43), "I": (53, 70), "B": (66, 77), "W": (80, 90)}
SHADES_OF_TWO = {"F": (33, 53), "B": (66, 84)}
HATCHES = {"W": "////"}  # of a kind whose shade can be taken for a neighbour's in grey
HATCH_COLOUR = "#6FA898"
MESSAGE = "#8A8A8A"  # the lines of a message on its way

DIGIT_WIDTH, DIGIT_HEIGHT = 0.64, 0.73  # of the font size: the font is DejaVu Sans, matplotlib's own
FILL = 0.78  # of a box: the most that its number may take
LARGEST, SMALLEST = 9.0, 5.0  # points; a number that would be smaller is left out
HALO = 1.2  # points around a number
BAR = 0.84  # of a box: where the bar of a later stage begins, counted from the top

Box = tuple[float, float, str, str]  # start, end, colour, the number inside


@cache
def action_of(name: str) -> Action | None:
    """Parse the computation that a slice of a trace is named by, as in "2F0"; None for any other name."""
    try:
        action = parse_action(name)
    except UsageError:
        return None
    return action if action.computes else None


def chunks(schedule: Schedule) -> dict[int, int]:
    """Number each stage among the stages of its rank: 0 is the first."""
    numbers: dict[int, int] = {}
    count: Counter[int] = Counter()  # of each rank's stages so far
    for stage, rank in sorted(schedule.home.items()):
        numbers[stage] = count[rank]
        count[rank] += 1
    return numbers


def palette(schedules: Iterable[Schedule]) -> dict[tuple[str, int], str]:
    """Choose a colour for each kind and each of a rank's stages (`chunks`), darkest first; a single one: the kind's."""
    schedules = list(schedules)
    kinds = {action.kind for schedule in schedules for _, action in schedule if action.computes}
    count = 1 + max((number for schedule in schedules for number in chunks(schedule).values()), default=0)
    shades = SHADES_OF_TWO if kinds <= set(SHADES_OF_TWO) else SHADES
    shade = {}
    for kind in (kind for kind in KINDS if kind in kinds):
        for number in range(count):
            dark, light = shades[kind]
            target = dark + (light - dark) * number / max(1, count - 1)
            shade[kind, number] = COLOURS[kind] if count == 1 else at_lightness(COLOURS[kind], target)
    return shade


def fitting(digits: int, width: float, height: float) -> float:
    """Compute the font size of numbers of so many digits in boxes of so many points: 0 if it could not be read."""
    size = min(FILL * width / (DIGIT_WIDTH * digits), 0.8 * height / DIGIT_HEIGHT, LARGEST)
    return size if size >= SMALLEST else 0.0


def number_boxes(
    axes: Axes,
    row: tuple[float, float],
    boxes: Sequence[Box],
    points: tuple[float, float],
    digits: int,
    largest: float = LARGEST,
) -> None:
    """Write the numbers of a row (top, height) of the axes, whose y grows downwards, where they can be read.

    points: how many points one unit of x and of y are; digits: of the longest number, for which all are sized;
    largest: the size of a number that has room.
    """
    top, height = row
    for start, end, colour, number in boxes:
        size = min(fitting(digits, (end - start) * points[0], height * points[1]), largest)
        if size:
            # Digits are centred by their own height (the height of a line would count what hangs below it).
            spot = (start + end) / 2, top + height / 2 + DIGIT_HEIGHT * size / 2 / points[1]
            look = {"ha": "center", "va": "baseline", "color": ink_on(colour), "clip_on": True}
            text = axes.text(*spot, number, fontsize=size, **look)
            text.set_path_effects([withStroke(foreground=colour, linewidth=HALO)])  # no hatching next to the digits


def mark_stages(
    axes: Axes, row: tuple[float, float], boxes: Sequence[tuple[float, float, str, int]], points: float, stages: int
) -> None:
    """Draw a bar at the bottom of each box of a rank's later stages, longer for each: shades alone may look the same.

    boxes: start, end, colour and the number of the stage (`chunks`) of each; points: of one unit of x.
    """
    top, height = row
    bars, faces = [], []
    for start, end, colour, stage in boxes:
        space = min(1.2 / points, 0.2 * (end - start))
        if stage:
            bars.append((start + space, (end - start - 2 * space) * stage / (stages - 1)))
            faces.append(ink_on(colour))
    if bars:
        axes.broken_barh(bars, (top + BAR * height, 0.09 * height), facecolors=faces, linewidth=0)


def hatch_boxes(axes: Axes, row: tuple[float, float], boxes: Sequence[tuple[float, float, str]]) -> None:
    """Hatch the boxes (start, end, kind) of the kinds that have a hatching."""
    for kind, hatch in HATCHES.items():
        bars = [(start, end - start) for start, end, of in boxes if of == kind]
        if bars:
            axes.broken_barh(bars, row, facecolors="none", edgecolors=HATCH_COLOUR, hatch=hatch, linewidth=0)


def draw_messages(axes: Axes, row: tuple[float, float], spans: Sequence[tuple[float, float]]) -> None:
    """Draw the spans (start, end) in which a rank waits for a message that is on its way."""
    bars = [(start, end - start) for start, end in spans]
    if bars:
        axes.broken_barh(bars, row, facecolors=PAPER, edgecolors=MESSAGE, hatch="....", linewidth=0)


def legend_handles(
    colours: dict[tuple[str, int], str], messages: bool = False
) -> tuple[list[tuple[Patch, ...]], list[str]]:
    """Build the legend: each kind with its shades side by side, the empty box of an idle rank, the stages' shades.

    messages: whether some rank waits for one that is on its way.
    """
    kinds = list(dict.fromkeys(kind for kind, _ in colours))
    handles: list[tuple[Patch, ...]] = [
        tuple(
            Patch(facecolor=colour, edgecolor=HATCH_COLOUR, hatch=HATCHES.get(kind), linewidth=0)
            for (of, _), colour in colours.items()
            if of == kind
        )
        for kind in kinds
    ]
    labels = [KINDS[kind] for kind in kinds] + ["idle"]
    handles.append((Patch(facecolor="white", edgecolor=GREY, linewidth=0.6),))
    if messages:
        handles.append((Patch(facecolor=PAPER, edgecolor=MESSAGE, hatch="....", linewidth=0),))
        labels.append("idle, a message is on its way")
    count = len(handles[0])
    if count > 1:
        handles.append(tuple(Patch(facecolor=str(0.3 + 0.5 * i / (count - 1))) for i in range(count)))
        later = "second" if count == 2 else "later ones"
        labels.append(f"the rank's first stage, {later} (with a bar)")
    return handles, labels


SIDE_BY_SIDE = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
