"""Draw for chapter 4: bits (4.2), buckets (4.4), weights of tokens (4.6), scaling (4.7), losses (4.8, more/)."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from chapters.support.draw import finish, note, show_time
from visualize.style import BLUE, COLOURS, GREEN, INK, LINES, PAPER, VERMILION, Picture, byte_label, ink_on, picture

ROWS = ("backward\ncompletes gradients", "a bucket\ncounts them", "all-reduces\nunder way", "synchronize")


def draw_life_of_buckets(gradients: Sequence[tuple[str, float, int]], sending: Sequence[float]) -> Picture:
    """Draw one rank's step: gradients are completed one by one, buckets fill, are sent, and are waited for.

    gradients    (name, seconds that backward needs for it, its bucket), in the order of backward
    sending      seconds of each bucket's all-reduce
    """
    figure = picture(7.0, 3.5)
    axes = figure.add_subplot()
    complete: list[list[float]] = [[] for _ in sending]  # when each bucket's gradients are complete
    starts: list[float] = []
    now = 0.0
    for name, seconds, bucket in gradients:
        _box(axes, 0, now, seconds, COLOURS["backward"], name)
        if not complete[bucket]:
            starts.append(now)
        now += seconds
        complete[bucket].append(now)
    end, wire = now, 0.0
    for bucket, (start, times) in enumerate(zip(starts, complete, strict=True)):
        _box(axes, 1, start, times[-1] - start, "white", "")
        for number, (left, right) in enumerate(zip(times, times[1:], strict=False), start=1):
            axes.add_patch(Rectangle((left, 1.4), right - left, -0.8 * number / len(times), color=PAPER, ec=INK))
            axes.text((left + right) / 2, 1.3, f"{number} of {len(times)}", ha="center", va="center", fontsize=8)
        axes.text(start + 0.1, 0.72, f"bucket {bucket}", ha="left", va="center", fontsize=8)
        wire = max(wire, times[-1])  # a communicator sends one bucket after the other
        arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (wire, 1.6), (times[-1], 1.4), arrowprops=arrow)
        _box(axes, 2, wire, sending[bucket], COLOURS["all_reduce"], f"bucket {bucket}")
        wire += sending[bucket]
    if wire > end:
        _box(axes, 3, end, wire - end, "white", "waits", hatch="///")
    axes.axvline(end, color=INK, linestyle=":", linewidth=1)
    axes.text(end + 0.1, -0.2, "backward ends", fontsize=8, va="center")
    axes.set_ylim(3.5, -0.5)
    label = "time on one rank; the number of complete gradients grows until the bucket is full"
    show_time(axes, ROWS, 1.02 * max(wire, end), label)
    return figure


def _box(axes: Axes, row: int, left: float, width: float, colour: str, text: str, hatch: str = "") -> None:
    axes.add_patch(Rectangle((left, row - 0.4), width, 0.8, facecolor=colour, edgecolor=INK, hatch=hatch))
    patch = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if hatch else None
    ink = INK if hatch else ink_on(colour)
    axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=8, color=ink, bbox=patch)


def plot_bucket_sizes(rows: Sequence[Mapping[str, Any]], naive: float, computation: float) -> Picture:
    """Draw seconds of a step against the size of its buckets, between two levels.

    rows         {"bucket_bytes", "seconds", "buckets"}, one point each
    naive        the step with one all-reduce after backward: nothing hidden
    computation  the step without any communication: everything hidden
    """
    rows = sorted(rows, key=lambda row: row["bucket_bytes"])
    figure = picture(7.5, 4.2)
    axes = figure.add_subplot()
    sizes, times = [row["bucket_bytes"] for row in rows], [row["seconds"] * 1e3 for row in rows]
    axes.axhline(naive * 1e3, color=VERMILION, linestyle="--", linewidth=1.5, label="one all-reduce after backward")
    axes.plot(sizes, times, "o-", color=BLUE, linewidth=1.8, label="buckets (their number above each point)")
    axes.axhline(computation * 1e3, color=GREEN, linestyle="--", linewidth=1.5, label="computation alone")
    for row, size, time in zip(rows, sizes, times, strict=True):
        note(axes, str(row["buckets"]), (size, time), (0, 8), ha="center")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: byte_label(value))
    axes.legend(frameon=False, loc="lower right")
    finish(axes, ylim=(0, 1.15 * max(*times, naive * 1e3)), xlabel="bucket size", ylabel="time of a step (ms)")
    return figure


def plot_differing(differing: Sequence[int]) -> Picture:
    """Draw for each chunk how many of the ring's sums differ from those in rank order."""
    figure = picture(7.0, 2.4)
    axes = figure.add_subplot()
    places = range(len(differing))
    axes.bar(places, differing, color=BLUE)
    for place, count in zip(places, differing, strict=True):
        axes.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=8)
    top = 1.2 * max(*differing, 1)
    axes.set_xticks(places)
    finish(axes, bars="x", ylim=(0, top), xlabel="chunk", ylabel="sums that differ\nin their last bits")
    return figure


def plot_departures(log: Sequence[tuple[int, int]]) -> Picture:
    """Draw when each bucket leaves: after how many complete gradients, and with how many values."""
    figure = picture(7.0, 0.9 + 0.3 * len(log))
    axes = figure.add_subplot()
    total = log[-1][0]
    for number, (completed, size) in enumerate(log):
        axes.barh(number, completed, color=COLOURS["backward"])
        axes.plot(completed, number, ">", color=COLOURS["all_reduce"], markersize=9)
        note(axes, f"{size:,} values leave", (completed, number), (8, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(log)), [f"bucket {number}" for number in range(len(log))], fontsize=8)
    axes.invert_yaxis()
    finish(axes, bars="y", xlim=(0, 1.3 * total), xlabel=f"complete gradients, of {total}, when the bucket leaves")
    return figure


def plot_weights(targets: Sequence[int]) -> Picture:
    """Draw how much a token counts on each rank in a mean of the ranks' means, relative to the mean of all tokens."""
    figure = picture(7.0, 2.4)
    axes = figure.add_subplot()
    places = range(len(targets))
    weights = [sum(targets) / (len(targets) * count) for count in targets]
    axes.bar(places, weights, color=VERMILION)
    axes.axhline(1, color=INK, linestyle="--", label="the right weight")
    axes.set_xticks(places, [f"rank {rank}:\n{count}" for rank, count in enumerate(targets)], fontsize=8)
    finish(axes, legend="upper left", bars="x", xlabel="targets per rank", ylabel="weight of a token")
    return figure


def plot_scaling(efficiencies: Mapping[int, tuple[float, float]]) -> Picture:
    """Draw efficiencies against the number of ranks: {ranks: (naive, with overlap)}."""
    figure = picture(7.0, 3.0)
    axes = figure.add_subplot()
    ranks = list(efficiencies)
    for place, (name, colour) in enumerate((("one all-reduce after backward", VERMILION), ("with overlap", BLUE))):
        values = [100 * both[place] for both in efficiencies.values()]
        axes.plot(ranks, values, "o-", color=colour, label=name)
        for count in (8, 64):
            value = 100 * efficiencies[count][place]
            note(
                axes,
                f"{value:.0f} %",
                (count, value),
                ((6, 4) if place else (-8, -14)),
                ha="left" if place else "right",
                fontsize=8,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    finish(axes, legend="lower left", xlabel="ranks, with one global batch", ylabel="efficiency (%)", ylim=(0, 112))
    return figure


def plot_losses(curves: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the losses of several runs, step by step."""
    figure = picture(7.0, 2.8)
    axes = figure.add_subplot()
    dashes = ("-", "--", "-.", ":")
    for colour, dash, (name, losses) in zip(LINES, dashes, curves.items(), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, dash, color=colour, label=name)
        axes.set_xticks(range(0, len(losses) + 1, 5))
    finish(axes, legend="upper right", xlabel="step", ylabel="loss (nats per byte)")
    return figure


def plot_local_steps(curves: Mapping[str, Sequence[float]], per_step: Mapping[str, float]) -> Picture:
    """Draw loss curves of local steps, beside the KiB that a rank sends per step: {name: losses}, {name: bytes}.

    A name that only one of the two has is drawn there alone.
    """
    figure = picture(7.5, 3.0)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.5, 1)})
    for colour, dash, (name, losses) in zip(LINES, ("-", "--", "-.", ":"), curves.items(), strict=False):
        left.plot(range(1, len(losses) + 1), losses, dash, color=colour, label=name)
    steps = max(len(losses) for losses in curves.values())
    left.set_xticks(range(0, steps + 1, 5))
    finish(left, legend="upper right", xlabel="step", ylabel="loss (nats per byte)")
    places, heights = range(len(per_step)), [nbytes / 1024 for nbytes in per_step.values()]
    right.bar(places, heights, 0.7, color=COLOURS["all_reduce"])
    for place, height in zip(places, heights, strict=True):
        note(right, f"{height:,.0f}", (place, height), (0, 4), ha="center", fontsize=8)
    right.set_xticks(places, list(per_step))
    finish(right, bars="x", ylim=(0, 1.2 * max(*heights, 0.1)), ylabel="KiB that rank 0 sends per step")
    return figure
