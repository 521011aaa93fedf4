"""Memory over one forward and backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visualize.style import INK, LINES, Picture, picture, tidy

Moment = tuple[str, int, int]  # where, bytes held there, the most held since the moment before


def plot_memory(runs: Mapping[str, Sequence[Moment]], turn: str | None = None) -> Picture:
    """Bytes held at named moments (line) and the peaks between them (dots): {run: moments}, the same moments in each.

    `turn` names the moment at which forward ends and backward begins.
    """
    figure = picture(9.0, 4.2)
    axes = figure.add_subplot()
    names: list[str] = []
    for (label, moments), colour in zip(runs.items(), LINES * len(runs), strict=False):
        names = [name for name, _, _ in moments]
        held = [now / 2**20 for _, now, _ in moments]
        peaks = [peak / 2**20 for _, _, peak in moments]
        text = f"{label}: held (peak {max(peaks):.1f} MiB)"
        axes.plot(range(len(names)), held, "-", color=colour, linewidth=2.0, label=text)
        axes.fill_between(range(len(names)), held, color=colour, alpha=0.12, linewidth=0)
        places = [place - 0.5 for place in range(1, len(names))]
        axes.plot(places, peaks[1:], "v", color=colour, markersize=6, label=f"{label}: most held in between")
    if turn is not None:
        axes.axvline(names.index(turn), color=INK, linestyle=":", linewidth=1.0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("memory (MiB)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    tidy(axes)
    return figure
