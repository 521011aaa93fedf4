"""Draw for chapter 5: what each rank holds at each stage (5.1), when stage 3 gathers and frees (5.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from chapters.support.draw import box, show_time
from visualize.style import COLOURS, INK, PAPER, Picture, picture

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
