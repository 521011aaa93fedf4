"""Draw for docs/planning.md: predicted against measured seconds of every run that the planner is compared with."""

from collections.abc import Mapping, Sequence

from chapters.support.draw import finish
from visualize.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, WINE, Picture, picture

Pairs = Sequence[tuple[float, float]]  # predicted, measured seconds of a step
LOOKS = (  # a colour and a marker for each source, in order
    (BLUE, "o"), (VERMILION, "o"), (GREEN, "D"), (WINE, "s"), (INK, "^"), (PURPLE, "v"), (SKY, "P"), (GREY, "."),
    (ORANGE, "."),
)  # fmt: skip
NEAR = 0.2  # the band


def share_near(pairs: Pairs) -> float:
    """Return the share of predictions that are within NEAR of the measured value."""
    return sum(abs(predicted / measured - 1) <= NEAR for predicted, measured in pairs) / len(pairs)


def plot_predictions(sources: Mapping[str, Pairs]) -> Picture:
    """Draw a point for each run: measured seconds, and predicted over measured. The legend has shares in the band."""
    figure = picture(11.5, 5.6)
    axes = figure.subplots()
    axes.axhspan(1 - NEAR, 1 + NEAR, color=GREEN, alpha=0.10, linewidth=0)
    axes.axhline(1, color=INK, linewidth=0.8)
    for (name, pairs), (colour, marker) in zip(sources.items(), LOOKS, strict=True):
        axes.plot(
            [measured for _, measured in pairs],
            [predicted / measured for predicted, measured in pairs],
            marker,
            color=colour,
            markersize=5 if marker != "." else 7,
            markeredgewidth=0,
            alpha=0.75,
            label=f"{name}: {100 * share_near(pairs):.0f} % of {len(pairs)}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.2, 0.3, 0.5, 0.8, 1, 1.2, 1.5], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("measured seconds of a step (logarithmic)")
    axes.set_ylabel("predicted / measured (logarithmic)")
    axes.legend(
        loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=10, title="runs, and share within 20 %"
    )
    runs = [pair for pairs in sources.values() for pair in pairs]
    figure.suptitle(f"{100 * share_near(runs):.0f} % of {len(runs)} measured runs are predicted within 20 %", color=INK)
    finish(axes)
    return figure
