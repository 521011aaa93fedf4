"""The picture of a comparison: for each parameter and step, how many times A's gradient B's is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.patches import Patch

from minipar.errors import UsageError

from .style import BLUE, INK, NOT_A_ROW, VERMILION, Picture, number, picture, read_json

EQUAL, NOT_FINITE, SAME_NORM = "#D0D0D0", "#7B2D8B", "#F4EAB0"  # none is white: the page is
OCTAVES = 3  # the colours end at 1/8 and at 8
MOST_NAMES = 60  # more names than that cannot be read below one another
RATIOS = LinearSegmentedColormap.from_list("ratio", [BLUE, "#8EC6EA", SAME_NORM, "#F0A070", VERMILION])

Ratios = Mapping[int, Mapping[str, float | None]]  # by step and parameter; None: equal, nan: not finite in A or B
TEXTS = {"Infinity": math.inf, "NaN": math.nan}  # JSON has no such numbers


def read_comparison(path: str) -> Ratios:
    """Read the ratios of `minipar.compare --json`. UsageError for another file."""
    data, foreign = read_json(path), "not written by minipar.compare --json"
    try:
        steps = {
            int(step): {str(name): _ratio(ratio) for name, ratio in ratios.items()}
            for step, ratios in data["ratios"].items()
        }
    except NOT_A_ROW as error:
        raise UsageError(f"{path}: {error!s:.80}: {foreign}") from None
    if not steps or len({tuple(ratios) for ratios in steps.values()}) > 1 or not next(iter(steps.values())):
        raise UsageError(f"{path} has no steps, or other parameters in each: {foreign}")
    return dict(sorted(steps.items()))


def _ratio(value: Any) -> float | None:
    """Convert a ratio of the file. TypeError or ValueError if it is none."""
    if value is None:
        return None
    if isinstance(value, str) and value in TEXTS:
        return TEXTS[value]
    return number(value, 0)


def plot_comparison(steps: Ratios, first: str = "run A", second: str = "run B") -> Picture:
    """Draw a row for each parameter and a column for each step: grey where A = B, else the ratio of the norms.

    first, second: the names of A and of B.
    """
    names = list(next(iter(steps.values())))
    figure = picture(8.0, min(max(3.0, 1.6 + 0.16 * len(names)), 14.0))
    axes = figure.add_subplot()
    colour_of = ScalarMappable(Normalize(-OCTAVES, OCTAVES), RATIOS)
    pixels = [[_colour(steps[step][name], colour_of) for step in steps] for name in names]
    axes.imshow(pixels, aspect="auto", interpolation="nearest")  # (parameters, steps, 3)
    every = -(-len(names) // MOST_NAMES)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    every = -(-len(steps) // 12)
    axes.set_xticks(range(0, len(steps), every), list(steps)[::every])
    axes.set_xlabel("step, counted from 0")
    differing = [step for step, ratios in steps.items() if any(ratio is not None for ratio in ratios.values())]
    result = f"they differ from step {differing[0]} on" if differing else "they are equal in every step"
    axes.set_title(f"Gradients of {second} and of {first}: {result}", fontsize=10.5, loc="left", color=INK)
    scale = figure.colorbar(colour_of, ax=axes, shrink=0.8, pad=0.02, extend="both")
    ticks = range(-OCTAVES, OCTAVES + 1)
    scale.set_ticks(ticks, labels=[f"{2**n}" if n >= 0 else f"1/{2**-n}" for n in ticks])
    scale.set_label(f"norm of {second}'s gradient / norm of {first}'s", fontsize=8.5)
    seen = {ratio for ratios in steps.values() for ratio in ratios.values()}
    keys = [Patch(color=EQUAL, label="equal within rounding")] if None in seen else []
    near = [ratio for ratio in seen if ratio and 0.9 < ratio < 1.1]
    keys += [Patch(color=SAME_NORM, label="another gradient of about the same norm")] if near else []
    keys += [Patch(color=INK, label="zero in one run")] if seen & {0.0, math.inf} else []
    keys += [Patch(color=NOT_FINITE, label="not finite")] if any(_is_nan(ratio) for ratio in seen) else []
    if keys:
        figure.legend(handles=keys, frameon=False, fontsize=8.5, ncols=3, loc="outside lower left")
    return figure


def _colour(ratio: float | None, colour_of: ScalarMappable) -> tuple[float, ...]:
    """Return the colour of a ratio: red, green and blue from 0 to 1."""
    if ratio is None:
        return to_rgb(EQUAL)
    if _is_nan(ratio):
        return to_rgb(NOT_FINITE)
    if ratio in (0, math.inf):
        return to_rgb(INK)
    return colour_of.to_rgba(math.log2(ratio))[:3]


def _is_nan(ratio: float | None) -> bool:
    return ratio is not None and math.isnan(ratio)
