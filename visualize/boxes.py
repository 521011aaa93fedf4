"""The boxes of a pipeline picture: which colour, and a number in each that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from minipar.errors import UsageError
from minipar.parallel.pipeline import Action, Schedule, parse_action
from visualize.style import COLOURS, GREY, at_lightness, ink_on

KINDS = {"F": "F forward", "B": "B backward", "I": "I backward, input", "W": "W backward, weights"}
# Lightness of a rank's first and last stage; F and B alone leave more room.
SHADES = {"F": (36, 47), "I": (58, 68), "B": (66, 77), "W": (79, 90)}
SHADES_OF_TWO = {"F": (33, 53), "B": (66, 84)}

DIGIT_WIDTH, DIGIT_HEIGHT = 0.64, 0.73  # of the font size: the font is DejaVu Sans, matplotlib's own
LINE = 0.9  # from one digit to the one under it, of the font size
FILL = 0.8  # how much of its box a number may take
LARGEST, SMALLEST = 9.0, 5.0  # points; what would be smaller is left out


Box = tuple[float, float, str, str]  # start, end, colour, the number inside


def action_of(name: str) -> Action | None:
    """The computation that a slice of a trace is named by, as in "2F0"; None for any other name."""
    try:
        action = parse_action(name)
    except UsageError:
        return None
    return action if action.computes else None


def chunks(schedule: Schedule) -> dict[int, int]:
    """For each stage, which of its rank's stages it is: 0 for the first."""
    found: dict[int, int] = {}
    for rank in set(schedule.home.values()):
        mine = sorted(stage for stage, home in schedule.home.items() if home == rank)
        found |= {stage: number for number, stage in enumerate(mine)}
    return found


def palette(schedules: Iterable[Schedule]) -> dict[tuple[str, int], str]:
    """A colour for each kind and each of a rank's stages (`chunks`), darkest first; one stage has the kind's own."""
    schedules = list(schedules)
    kinds = {action.kind for schedule in schedules for _, action in schedule if action.computes}
    count = 1 + max((number for schedule in schedules for number in chunks(schedule).values()), default=0)
    shades = SHADES_OF_TWO if kinds <= set(SHADES_OF_TWO) else SHADES
    found = {}
    for kind in (kind for kind in KINDS if kind in kinds):
        for number in range(count):
            dark, light = shades[kind]
            target = dark + (light - dark) * number / max(1, count - 1)
            found[kind, number] = COLOURS[kind] if count == 1 else at_lightness(COLOURS[kind], target)
    return found


def fitting(digits: int, width: float, height: float) -> tuple[bool, float]:
    """Whether numbers of so many digits stand upright in boxes of so many points, one digit above the other, and the
    font size that fits: 0 if it could not be read.
    """
    flat = min(FILL * width / (DIGIT_WIDTH * digits), FILL * height / DIGIT_HEIGHT, LARGEST)
    tall = min(FILL * width / DIGIT_WIDTH, FILL * height / (LINE * (digits - 1) + DIGIT_HEIGHT), LARGEST)
    upright = tall > 1.25 * flat or flat < SMALLEST
    size = tall if upright else flat
    return upright, size if size >= SMALLEST else 0.0


def number_boxes(
    axes: Axes, row: tuple[float, float], boxes: Sequence[Box], points: tuple[float, float], digits: int
) -> None:
    """Write the numbers of a row (top, height) of the axes, whose y grows downwards, where they can be read.

    points: how many points one unit of x and of y are; digits: of the longest number, for which all are sized.
    """
    top, height = row
    for start, end, colour, number in boxes:
        upright, size = fitting(digits, (end - start) * points[0], height * points[1])
        lines = list(number) if upright else [number]
        for i, line in enumerate(lines if size else []):
            # Digits are centred by their own height (the height of a line would count what hangs below it).
            below = (i - (len(lines) - 1) / 2) * LINE * size + DIGIT_HEIGHT * size / 2
            y = top + height / 2 + below / points[1]
            note = axes.text(
                (start + end) / 2,
                y,
                line,
                ha="center",
                va="baseline",
                fontsize=size,
                color=ink_on(colour),
                clip_on=True,
            )
            note.set_in_layout(False)


def legend_handles(colours: dict[tuple[str, int], str]) -> tuple[list[tuple[Patch, ...]], list[str]]:
    """For each kind its shades side by side; the empty box of an idle rank; and what the shades say."""
    kinds = list(dict.fromkeys(kind for kind, _ in colours))
    handles: list[tuple[Patch, ...]] = [
        tuple(Patch(facecolor=colour) for (of, _), colour in colours.items() if of == kind) for kind in kinds
    ]
    labels = [KINDS[kind] for kind in kinds] + ["idle"]
    handles.append((Patch(facecolor="white", edgecolor=GREY, linewidth=0.6),))
    count = len(handles[0])
    if count > 1:
        handles.append(tuple(Patch(facecolor=str(0.3 + 0.5 * i / (count - 1))) for i in range(count)))
        labels.append("the rank's first stage, second" + (", ..." if count > 2 else ""))
    return handles, labels


SIDE_BY_SIDE = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
