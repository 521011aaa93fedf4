"""Draw for chapter 5: who holds what (5.1, 5.2), gathers and times (5.6), bytes (5.9), hosts (5.11)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from chapters.support.draw import RANKS, box, finish, patches, show_cells, show_time
from visualize.style import BLUE, COLOURS, INK, LINES, PAPER, VERMILION, Picture, picture

STATE = ("parameters", "gradients", "optimizer")
HATCHES = ("", "///", "...")


def draw_model_state(whole: Sequence[int], ranks: int) -> Picture:
    """Draw the model state per rank at stages 0 to 3: a bar for each rank, filled where the rank holds something.

    whole    bytes per parameter of parameters, gradients and optimizer state
    ranks    bars per stage; a kind that a stage shards is filled in one of as many slices, the rank's own
    """
    figure = picture(7.0, 3.9)
    panels = figure.subplots(1, 4, sharey=True)
    for stage, axes in enumerate(panels):
        for rank in range(ranks):
            bottom, total = 0.0, 0.0
            for kind, (size, hatch) in enumerate(zip(whole, HATCHES, strict=True)):
                axes.add_patch(Rectangle((rank - 0.4, bottom), 0.8, size, facecolor="none", edgecolor="#999999"))
                sharded = stage >= 3 - kind  # optimizer state from stage 1 on, gradients from 2, parameters from 3
                own = size / ranks if sharded else size
                start = bottom + (rank * own if sharded else 0)
                colour = COLOURS[STATE[kind]]
                patch = Rectangle((rank - 0.4, start), 0.8, own, facecolor=colour, edgecolor=INK, hatch=hatch)
                patch.set_label(STATE[kind])
                axes.add_patch(patch)
                bottom, total = bottom + size, total + own
            axes.text(rank, sum(whole) + 0.2, f"{total:g}", ha="center", va="bottom", fontsize=8)
        axes.set_title(f"stage {stage}", fontsize=10)
        axes.set_xticks(range(ranks), [str(rank) for rank in range(ranks)], fontsize=8)
        axes.set_xlabel("rank", fontsize=9)
        axes.set_xlim(-0.6, ranks - 0.4)
        axes.set_ylim(0, 1.1 * sum(whole))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bytes per parameter of the model", fontsize=9)
    handles = [panels[0].patches[2 * kind + 1] for kind in range(3)]
    names = [f"{name}: {size} bytes" for name, size in zip(STATE, whole, strict=True)]
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


@dataclass(frozen=True)
class Slot:
    """An action of a rank on a unit from `start` to `end`: AG is an all-gather, RS a reduce-scatter, F and B compute.

    `frees`: the unit's parameters are freed at the end.
    """

    unit: int
    action: str
    start: float
    end: float
    frees: bool = False


def gather_and_free(units: int, forward: float, backward: float, wire: float, prefetch: bool = True) -> list[Slot]:
    """Lay out one step of stage 3, by the rules of minipar.parallel.fsdp.

    A unit computes when it is gathered; with `prefetch` the next one's gather starts when this one's computation does.
    The wire does one thing after the other, in the order of requests, `wire` seconds each. The last unit stays gathered
    from its forward to its backward.
    """
    slots: list[Slot] = []
    gathered: dict[int, float] = {}  # when the gather of a unit ends
    now, free = 0.0, 0.0

    def send(unit: int, action: str) -> None:
        nonlocal free
        start = max(now, free)
        free = start + wire
        slots.append(Slot(unit, action, start, free))

    order = [("F", unit, forward) for unit in range(units)] + [("B", unit, backward) for unit in reversed(range(units))]
    for place, (action, unit, seconds) in enumerate(order):
        if unit not in gathered:
            send(unit, "AG")
            gathered[unit] = free
        now = max(now, gathered[unit])
        following = [other for _, other, _ in order[place + 1 :] if other != unit]
        if prefetch and following and following[0] not in gathered:
            send(following[0], "AG")
            gathered[following[0]] = free
        is_last = (action, unit) == ("F", units - 1)
        slots.append(Slot(unit, action, now, now + seconds, frees=not is_last))
        now += seconds
        if action == "B":
            send(unit, "RS")
        if not is_last:
            del gathered[unit]
    return slots


def draw_gather_and_free(slots: Sequence[Slot]) -> Picture:
    """Draw a row for each unit: what the rank does with it, and when the unit's parameters are whole."""
    units = 1 + max(slot.unit for slot in slots)
    figure = picture(7.0, 1.1 + 0.6 * units)
    axes = figure.add_subplot()
    names = {"AG": "all_gather", "F": "forward", "B": "backward", "RS": "reduce_scatter"}
    whole: dict[int, float] = {}  # since when a unit's parameters are whole, or on their way
    for slot in slots:
        corner, size = (slot.start, slot.unit - 0.25), (slot.end - slot.start, 0.5)
        box(axes, corner, size, COLOURS[names[slot.action]], slot.action, va="center", edgecolor=INK)
        if slot.action == "AG":
            whole[slot.unit] = slot.start
        if slot.frees:
            _free(axes, slot.unit, whole.pop(slot.unit), slot.end)
    axes.set_ylim(units - 0.5, -0.6)
    label = (
        "time on one rank.  AG all-gather, F forward, B backward, RS reduce-scatter\n"
        "grey: the unit's parameters are whole or arriving; thick line: they are freed"
    )
    show_time(axes, [f"unit {unit}" for unit in range(units)], 1.01 * max(slot.end for slot in slots), label)
    return figure


def _free(axes: Axes, unit: int, start: float, end: float) -> None:
    axes.add_patch(Rectangle((start, unit - 0.4), end - start, 0.8, facecolor=PAPER, edgecolor="none", zorder=0))
    axes.plot([end, end], [unit - 0.4, unit + 0.4], color=INK, linewidth=2.5)


MINE, SUM, NEW = "#F6D9A0", COLOURS["gradients"], COLOURS["optimizer"]  # what a block of the next picture holds


def draw_two_orders(ranks: int) -> Picture:
    """Draw what each rank's blocks hold in a step of stage 0 (above) and of stage 1 (below): rows are ranks."""
    own = np.eye(ranks, dtype=bool)
    everything = np.ones((ranks, ranks), dtype=bool)
    first = [("backward:\nown gradients", everything, MINE), ("reduce-scatter:\nown chunk summed", own, SUM)]
    stages = {
        "stage 0": [
            *first,
            ("all-gather:\nall sums", everything, SUM),
            ("everybody updates\neverything", everything, NEW),
        ],
        "stage 1": [
            *first,
            ("each updates\nits own chunk", own, NEW),
            ("all-gather:\nall parameters", everything, NEW),
        ],
    }
    figure = picture(7.0, 4.0)
    panels = figure.subplots(2, 4)
    for line, (stage, moments) in zip(panels, stages.items(), strict=True):
        for place, (axes, (title, filled, colour)) in enumerate(zip(line, moments, strict=True)):
            for (rank, chunk), is_filled in np.ndenumerate(filled):
                axes.add_patch(Rectangle((chunk, rank), 0.92, 0.92, color=colour if is_filled else PAPER))
            show_cells(axes, ranks, ranks, [f"rank {rank}" for rank in range(ranks)] if place == 0 else [], side=0.92)
            axes.set_aspect("equal")
            axes.set_title(title, fontsize=8)
            if place == 0:
                axes.set_ylabel(stage, fontsize=10)
    colours = {"gradient of the own samples": MINE, "sum over the ranks": SUM, "updated parameters": NEW}
    figure.legend(handles=patches(colours), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_identities() -> Picture:
    """Draw a unit between its two identities: forward goes right, backward goes left and calls the hooks."""
    figure = picture(7.0, 2.1)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-1.3, 9.3), ylim=(0.35, 3.4))
    for left, width, colour, text in (
        (0.9, 1.7, PAPER, "identity\non the input"),
        (3.3, 1.6, BLUE, "the unit\n(a block)"),
        (5.6, 1.7, PAPER, "identity\non the output"),
    ):
        box(axes, (left, 1.6), (width, 0.9), colour, text, va="center", edgecolor=INK)
    arrows = ((-0.2, 0.9), (2.6, 3.3), (4.9, 5.6), (7.3, 8.4))
    for start, end in arrows:
        for height, tail, tip, colour in ((2.3, start, end, BLUE), (1.8, end, start, VERMILION)):
            look = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.6}
            axes.annotate("", (tip, height), (tail, height), arrowprops=look)
    axes.text(-0.3, 2.3, "forward: x", color=BLUE, fontsize=8, ha="right", va="center")
    axes.text(8.5, 2.3, "y", color=BLUE, fontsize=8, va="center")
    axes.text(8.5, 1.8, "gradient", color=VERMILION, fontsize=8, va="center")
    for x, text in (
        (6.45, "1. backward comes here first\npre_backward: gather"),
        (4.1, "2. then here:\ngradients\nof the unit"),
        (1.75, "3. and here last:\nfree"),
    ):
        axes.text(x, 1.35, text, ha="center", va="top", fontsize=8, color=INK)
    axes.text(1.75, 2.75, "before forward:\ngather", ha="center", fontsize=8, color=INK)
    axes.text(6.45, 2.75, "after forward:\nfree", ha="center", fontsize=8, color=INK)
    return figure


def plot_step_times(times: Mapping[str, Mapping[str, float]], computation: float) -> Picture:
    """Draw a panel for each network: {network: {name of a step: seconds}}, beside the seconds of computation alone."""
    figure = picture(7.0, 2.7)
    panels = figure.subplots(1, len(times), sharey=True)
    for axes, (network, steps) in zip(panels, times.items(), strict=True):
        places = range(len(steps))
        milliseconds = [seconds * 1e3 for seconds in steps.values()]
        axes.barh(places, milliseconds, color=LINES[: len(steps)])
        axes.axvline(computation * 1e3, color=INK, linestyle=":")
        for place, value in zip(places, milliseconds, strict=True):
            axes.text(value, place, f" {value:.2f}", va="center", fontsize=8)
        axes.set_yticks(places, list(steps), fontsize=8)
        finish(axes, network, bars="y", xlabel="step, ms; dotted: computation", xlim=(0, 1.2 * max(milliseconds)))
    panels[0].invert_yaxis()
    return figure


def plot_microbatches(
    formulas: Mapping[str, tuple[float, float]], measured: Mapping[str, tuple[int, float]]
) -> Picture:
    """Draw multiples of Psi (d-1)/d sent per step against m: lines a + b m for each way, and what was counted.

    formulas  {way: (a, b)}
    measured  {way: (m, multiple)}
    """
    figure = picture(7.0, 3.0)
    axes = figure.add_subplot()
    m = np.arange(1, 9)
    for colour, dashes, (way, (constant, slope)) in zip(LINES, ("-", "--", "-", "--"), formulas.items(), strict=False):
        axes.plot(m, constant + slope * m, color=colour, linestyle=dashes, label=way)
        if way in measured:
            axes.plot(*measured[way], "o", color=colour)
    label = "sent per step, in Ψ(d-1)/d elements"
    finish(axes, legend="upper left", xlabel="microbatches m; dots: counted in this run", ylabel=label)
    return figure


def draw_shards_and_replicas(hosts: int, per_host: int) -> Picture:
    """Draw hybrid sharding: each host is a row of ranks and holds all shards; a column holds one shard."""
    figure = picture(7.0, 0.9 + 0.95 * hosts)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-1.5, per_host + 2.6), ylim=(hosts + 0.15, -0.45))
    for host in range(hosts):
        axes.text(-1.4, host + 0.4, f"host {host}: a replica\nof all shards", fontsize=8, va="center")
        for place in range(per_host):
            colour = RANKS[place]
            text = f"rank {host * per_host + place}\nshard {place}"
            box(axes, (place + 0.08, host + 0.1), (0.84, 0.6), colour, text, va="center")
        look = {"arrowstyle": "<->", "color": INK, "linewidth": 1.4}
        axes.annotate("", (0.1, host + 0.8), (per_host - 0.1, host + 0.8), arrowprops=look)
        text = "inside: gather, gather,\nreduce-scatter of Ψ"
        axes.text(per_host + 0.15, host + 0.8, text, fontsize=8, va="center")
    for place in range(per_host * (hosts - 1)):
        host, column = divmod(place, per_host)
        look = {"arrowstyle": "<->", "color": VERMILION, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (column + 0.5, host + 0.7), (column + 0.5, host + 1.1), arrowprops=look)
    axes.text(
        per_host + 0.15,
        0.3,
        "between (red): all-reduce\nof a shard's gradient",
        fontsize=8,
        va="center",
        color=VERMILION,
    )
    return figure
