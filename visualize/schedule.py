"""Pictures of pipeline schedules: a row for each rank, a box for each action, and the activations alive meanwhile.

A schedule's timeline comes from the simulator (`simulate` of `minipar.parallel.pipeline.actions`) or from the trace of
a run. Several are drawn on one time axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import PAIR, Durations, Slot, Time, Timeline, simulate
from minipar.parallel.pipeline.schedules import SCHEDULES, make

from .boxes import (
    BAR,
    DIGIT_WIDTH,
    FILL,
    KINDS,
    LARGEST,
    SIDE_BY_SIDE,
    SMALLEST,
    chunks,
    draw_messages,
    fitting,
    hatch_boxes,
    legend_handles,
    mark_stages,
    number_boxes,
    palette,
)
from .message_time import awaited_messages, takes_messages
from .schedule_file import splits_backward
from .style import GREY, INK, PAPER, VERMILION, Picture, at_lightness, printable
from .timeline import time_unit

NAMES = {
    "naive": "Naive",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zbv": "ZB-V",
    "dualpipev": "DualPipeV",
}
# Inches. The size of every box must be known before its number is written, so the layout is made here, by hand.
LEFT, RIGHT, TITLE, AXIS, LEGEND, PEAK = 0.72, 0.46, 0.34, 0.46, 0.32, 0.28  # PEAK: each further column of peaks
NARROWEST, WIDEST = 11.0, 24.0
POINTS = 72
LONGEST_NAME = 20  # of a file, beside the facts
FIRST, OTHER = at_lightness(GREY, 45), at_lightness(VERMILION, 48)  # dark enough for the digits of the peaks
LONGEST_FRACTION = 1000  # a denominator beyond this says less than the percentage


def stages_per_rank(timeline: Timeline) -> int:
    """Count the stages of the rank that has most."""
    return 1 + max(chunks(timeline.schedule).values(), default=0)


def bubble_text(bubble: Time) -> str:
    """Write a bubble as "3/11 = 27.3 %": as an exact fraction too where it is one."""
    if bubble == 0:
        return "0"
    percent = f"{100 * float(bubble):.1f} %"
    if isinstance(bubble, Fraction) and bubble.denominator <= LONGEST_FRACTION:
        return f"{bubble} = {percent}"
    return percent


def bubble_rate(timeline: Timeline) -> Time:
    """Return idle / cost of the rank with the largest cost: arXiv 2401.10241, section 5.3.

    A rank's cost is the time from the start of its first action to the end of its last.
    """
    rate: Time = 0
    largest: Time = 0
    for slots in filter(None, timeline.ranks):
        cost = slots[-1].end - slots[0].start
        if cost > largest:
            busy = sum(slot.end - slot.start for slot in slots)
            largest = cost
            rate = Fraction(cost - busy) / cost
    return rate


def facts(timeline: Timeline) -> str:
    """State the bubble and the most activations that a rank holds.

    Zero Bubble's paper leaves out the time before a rank's first action and after its last: where that differs from
    idle / total, both are stated.
    """
    bubble = f"bubble (idle / total) {bubble_text(timeline.bubble_fraction)}"
    rate, fraction = float(bubble_rate(timeline)), float(timeline.bubble_fraction)
    if abs(rate - fraction) > 1e-9 and splits_backward(timeline.schedule):
        inside = "none" if rate < 1e-9 else bubble_text(bubble_rate(timeline))
        bubble += f", {inside} from a rank's first to its last action"
    peak, v = max(timeline.peak_activations, default=0), stages_per_rank(timeline)
    # With v stages per rank each holds 1/v of the rank's layers, and so of their activations.
    return f"{bubble}  ·  peak {f'{peak}/{v} = {peak / v:g}' if v > 1 else peak} activation{'s' * (peak != 1)}"


def sizes_text(timelines: Sequence[Timeline], times: bool = True) -> str:
    """State p and m, if they are the same in all timelines, and the times of the actions (unless `times` is false)."""
    sizes = {(len(timeline.ranks), timeline.schedule.microbatches) for timeline in timelines}
    parts = [f"p = {p} rank{'s' * (p != 1)}, m = {m} microbatch{'es' * (m != 1)}" for p, m in sizes if len(sizes) == 1]
    return ";  ".join([*parts, *filter(None, [times_text(timelines) if times else ""])])


def times_text(timelines: Iterable[Timeline]) -> str:
    """State the times, "F = I = W = 1, B = 2 for all layers of a rank", of the kinds that have one time everywhere.

    The time of a message between ranks follows, if it is not 0.
    """
    timelines = list(timelines)
    times: dict[str, set[Time]] = {kind: set() for kind in (*KINDS, PAIR)}
    several = False
    for timeline in timelines:
        v = stages_per_rank(timeline)
        several = several or v > 1
        for slot in (slot for row in timeline.ranks for slot in row):
            times[slot.action.kind].add(v * (slot.end - slot.start))
    kinds: dict[str, list[str]] = {}
    for kind, durations in times.items():
        if len(durations) == 1:
            kinds.setdefault(f"{float(durations.pop()):.4g}", []).append("F&B" if kind == PAIR else kind)
    text = ", ".join(" = ".join([*equal, time]) for time, equal in kinds.items())
    if text and several:
        text = f"{text} for all layers of a rank"
    messages = {timeline.comm for timeline in timelines}
    if len(messages) == 1 and messages != {0}:
        text = ", ".join(filter(None, [text, f"a message between ranks = {float(messages.pop()):.4g}"]))
    return text


def live_activations(slots: Sequence[Slot]) -> list[tuple[Time, int]]:
    """Return (time, activations alive from then on) for one rank: from the start of F to the end of B or I."""
    halves = [(half.kind, slot) for slot in slots for half in slot.action.halves]
    changes = [(slot.start, 1) for kind, slot in halves if kind == "F"]
    changes += [(slot.end, -1) for kind, slot in halves if kind in ("B", "I")]
    live, steps = 0, {slots[0].start if slots else 0: 0}
    for time, change in sorted(changes):  # all changes at one time are one step
        live += change
        steps[time] = live
    return list(steps.items())


def gallery(p: int, m: int, durations: Durations | None = None) -> dict[str, Timeline]:
    """Simulate every schedule of p ranks and m microbatches for one model: `durations` (1 each) of a rank's layers.

    A stage of a schedule with v stages per rank takes 1/v of them. Schedules that do not exist for p and m are left
    out.
    """
    durations = durations or Durations()
    timelines = {}
    for name in SCHEDULES:
        try:
            schedule = make(name, p, m)
        except UsageError:
            continue
        v = Fraction(schedule.stages, p)
        times = durations.forward / v, durations.backward_input / v, durations.backward_weight / v
        timelines[NAMES[name]] = simulate(schedule, Durations(*times, durations.comm))
    return timelines


def plot_schedule(timelines: Timeline | Mapping[str, Timeline], seconds: bool = False) -> Picture:
    """Draw each rank's actions over time, microbatch numbers inside; several timelines one above the other.

    Under them are the activations alive on each rank, of the first timeline; those of the others are lines. Each
    timeline has a column of peaks at the right.

    timelines  one, or {label: timeline}, as in {"predicted": ..., "measured": ...}
    seconds    times are seconds, as of a trace; otherwise they are units of the simulator
    """
    labelled = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    sheet = _Sheet(list(labelled.values()), seconds, columns=len(labelled))
    rows = [len(timeline.ranks) * _row(timeline) for timeline in labelled.values()]
    ranks = len(next(iter(labelled.values())).ranks)
    figure, axes = sheet.lay_out([*rows, ranks * min(0.24, 0.6 / max(1, ranks) ** 0.5)])
    for (label, timeline), panel in zip(labelled.items(), axes, strict=False):
        name = printable(NAMES.get(timeline.schedule.name, timeline.schedule.name))
        name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        sheet.draw(panel, timeline, f"{name}, {label}" if label else name, facts(timeline))
    sheet.draw_memory(axes[-1], labelled)
    return figure


def plot_schedules(timelines: Mapping[str, Timeline]) -> Picture:
    """Draw many schedules one above the other on one time axis, {name: timeline} as `gallery` gives them.

    One that takes far longer than all others is cut, with its time at the edge.
    """
    sheet = _Sheet(list(timelines.values()), cut=True)
    heights = [0.75 * len(timeline.ranks) * _row(timeline) for timeline in timelines.values()]
    figure, axes = sheet.lay_out(heights)
    for (name, timeline), panel in zip(timelines.items(), axes, strict=True):
        sheet.draw(panel, timeline, name, f"time {float(timeline.makespan):g}  ·  {facts(timeline)}")
    return figure


def _row(timeline: Timeline) -> float:
    """Choose the inches for each rank: generous for a few, still visible for many."""
    return min(0.3, 0.8 / max(1, len(timeline.ranks)) ** 0.5)


@dataclass
class _Sheet:
    """Everything that the panels of one picture share: colours, width, the time axis."""

    timelines: Sequence[Timeline]
    seconds: bool = False
    cut: bool = False
    columns: int = 1  # of peaks, at the right

    def __post_init__(self) -> None:
        if not self.timelines:
            raise UsageError("no timeline to draw")
        self.colours = palette(timeline.schedule for timeline in self.timelines)
        ends = sorted(float(timeline.makespan) for timeline in self.timelines)
        if not ends[-1] > 0:
            raise UsageError("the schedule takes no time: there is nothing to draw")
        self.unit, self.scale = time_unit(ends[-1]) if self.seconds else ("", 1.0)
        self.span = ends[-1] * self.scale
        if self.cut and len(ends) > 1 and ends[-1] > 1.5 * ends[-2]:
            self.span = 1.06 * ends[-2] * self.scale
        self.digits = max(len(str(timeline.schedule.microbatches - 1)) for timeline in self.timelines)
        self.beside = LEFT + RIGHT + PEAK * (self.columns - 1)
        self.width = self._readable()

    def _readable(self) -> float:
        """Compute the inches that leave space for numbers in all but the shortest boxes."""
        slots = (slot for timeline in self.timelines for row in timeline.ranks for slot in row)
        lengths = sorted(float(slot.end - slot.start) for slot in slots if slot.end > slot.start)
        short = lengths[len(lengths) // 10] * self.scale
        number = 1.02 * SMALLEST * DIGIT_WIDTH * self.digits / FILL  # points
        short = max(short, 1e-3 * self.span)
        width = min(max(number / POINTS * self.span / short + self.beside, NARROWEST), WIDEST)
        # All numbers have the size that fits these boxes.
        room = fitting(self.digits, short * POINTS * (width - self.beside) / self.span, math.inf)
        self.size = room or LARGEST
        return width

    def lay_out(self, heights: Sequence[float]) -> tuple[Picture, list[Axes]]:
        """Make panels of these heights (inches) below the sizes, the time under the last, the legend under all."""
        header = sizes_text(self.timelines, times=not self.seconds)
        above = 0.75 * TITLE if header else 0.0
        total = above + sum(heights) + TITLE * len(heights) + AXIS + LEGEND
        figure = Picture(figsize=(self.width, total), facecolor="white")
        self.inner, self.total = self.width - self.beside, total
        look = {"ha": "center", "va": "top", "fontsize": 11, "color": INK}
        figure.text(0.5, 1 - 0.1 / total, header, **look)
        axes, top = [], total - above
        for height in heights:
            top -= TITLE + height
            axes.append(figure.add_axes((LEFT / self.width, top / total, self.inner / self.width, height / total)))
        for panel in axes:
            panel.set_xlim(0, self.span)
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.tick_params(axis="y", length=0, pad=4)
            panel.spines["bottom"].set_visible(panel is axes[-1])
            panel.tick_params(axis="x", bottom=panel is axes[-1], labelbottom=panel is axes[-1], labelsize=9)
        axes[-1].xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        note = "number in a box: its microbatch"
        if any(slot.action.pair for timeline in self.timelines for row in timeline.ranks for slot in row):
            note += "; F above B: a pair, both at once"
        axes[-1].set_xlabel(f"time ({self.unit}; {note})" if self.unit else f"time ({note})", fontsize=9)
        messages = any(takes_messages(timeline) for timeline in self.timelines)
        handles, labels = legend_handles(self.colours, messages)
        figure.legend(
            handles, labels, handler_map=SIDE_BY_SIDE, loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=len(labels),
            frameon=False, fontsize=9, handlelength=1.6, columnspacing=1.8,
        )  # fmt: skip
        return figure, axes

    def points(self, panel: Axes, ranks: int) -> tuple[float, float]:
        """Compute how many points are one unit of time, and one rank."""
        return POINTS * self.inner / self.span, POINTS * self.total * panel.get_position().height / ranks

    def draw(self, panel: Axes, timeline: Timeline, name: str, facts: str) -> None:
        """Draw one timeline, its name on the left above it and its facts on the right."""
        ranks, v = len(timeline.ranks), stages_per_rank(timeline)
        chunk = chunks(timeline.schedule)
        end = float(timeline.makespan) * self.scale
        points = self.points(panel, ranks)
        awaited = awaited_messages(timeline) if takes_messages(timeline) else [[]] * ranks
        for rank, slots in enumerate(timeline.ranks):
            top, height = row = (rank + 0.04, 0.92)
            panel.broken_barh([(0, end)], row, facecolor="white", edgecolor=PAPER, linewidth=0.8)
            spans = [(float(start) * self.scale, float(end) * self.scale) for start, end in awaited[rank]]
            draw_messages(panel, row, spans)
            shown = [slot for slot in slots if float(slot.start) * self.scale < self.span]
            # A pair's F is in the upper half of the row and its B below, both for the pair's whole time.
            pairs = [slot for slot in shown if slot.action.pair]
            lanes = [(row, [slot for slot in shown if not slot.action.pair])]
            for i in range(2 if pairs else 0):
                halves = [Slot(slot.action.halves[i], slot.start, slot.end) for slot in pairs]
                lanes.append(((top + i * height / 2, height / 2), halves))
            for lane, boxes in lanes:
                self._draw_boxes(panel, lane, boxes, chunk, v, points)
        if end > self.span:
            self._beside(panel, ranks / 2, f"▸ {end:g}")
        self._ranks(panel, ranks)
        name = f"{name}, v = {v}" if v > 1 else name
        panel.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=4)
        panel.set_title(facts, loc="right", fontsize=9.5, color=INK, pad=4)

    def _draw_boxes(
        self,
        panel: Axes,
        row: tuple[float, float],
        slots: Sequence[Slot],
        chunk: Mapping[int, int],
        stages: int,
        points: tuple[float, float],
    ) -> None:
        """Draw boxes with their numbers and marks in a row (top, height); `points` as `self.points` returns them."""
        spans = [(float(slot.start) * self.scale, float(slot.end) * self.scale) for slot in slots]
        chunks = [chunk[slot.action.stage] for slot in slots]
        faces = [self.colours[slot.action.kind, number] for slot, number in zip(slots, chunks, strict=True)]
        bars = [(start, end - start) for start, end in spans]
        edge = min([0.6, *(0.1 * points[0] * length for _, length in bars)])
        panel.broken_barh(bars, row, facecolors=faces, edgecolors="white", linewidth=edge)
        hatch_boxes(panel, row, [(*span, slot.action.kind) for span, slot in zip(spans, slots, strict=True)])
        marks = [(*span, face, number) for span, face, number in zip(spans, faces, chunks, strict=True)]
        mark_stages(panel, row, marks, points[0], stages)
        texts = [str(slot.action.microbatch) for slot in slots]
        boxes = [(*span, face, text) for span, face, text in zip(spans, faces, texts, strict=True)]
        space = (row[0], BAR * row[1]) if stages > 1 else row  # no number touches the bar of its stage
        number_boxes(panel, space, [box for box in boxes if box[1] <= self.span], points, self.digits, self.size)

    def _beside(self, panel: Axes, y: float, text: str, above: float = 0, column: int = 0, colour: str = INK) -> None:
        """Write text in a column of the margin at the right."""
        panel.annotate(
            text, (self.span, y), xytext=(5 + POINTS * PEAK * column, above), textcoords="offset points",
            va="center_baseline", fontsize=9, color=colour, annotation_clip=False,
        )  # fmt: skip

    def _ranks(self, panel: Axes, ranks: int) -> range:
        """Name the ranks, only some of them where there is no space for all, and return those that are named."""
        shown = range(0, ranks, math.ceil(11 / self.points(panel, ranks)[1]))
        panel.set_ylim(ranks, 0)
        panel.set_yticks([rank + 0.5 for rank in shown], [f"rank {rank}" for rank in shown], fontsize=9)
        return shown

    def draw_memory(self, panel: Axes, timelines: Mapping[str, Timeline]) -> None:
        """Draw the activations alive on each rank as steps from the bottom of its row, and its peaks on the right."""
        first = next(iter(timelines.values()))
        shown = self._ranks(panel, len(first.ranks))
        peak = max(1, *(peak for timeline in timelines.values() for peak in timeline.peak_activations))
        for number, (label, timeline) in enumerate(timelines.items()):
            colour = OTHER if number else FIRST
            for rank, slots in enumerate(timeline.ranks):
                floor = rank + 0.94
                steps = live_activations(slots)
                times = [float(when) * self.scale for when, _ in steps]
                levels = [floor - 0.86 * live / peak for _, live in steps]
                name = label if rank == 0 else None  # once in the legend
                if number == 0:
                    panel.fill_between(times, levels, floor, step="post", color=GREY, alpha=0.55, lw=0, label=name)
                    panel.step(times, levels, where="post", color=colour, linewidth=0.7)
                else:
                    panel.step(times, levels, where="post", color=colour, linewidth=1.0, label=name)
            for rank in shown:
                self._beside(panel, rank + 0.5, str(timeline.peak_activations[rank]), column=number, colour=colour)
        v = stages_per_rank(first)
        size = f" (each of 1/{v} of the rank's layers)" if v > 1 else ""
        panel.set_title(f"activations alive{size}", loc="left", fontsize=9.5, color=INK, pad=4)
        if len(timelines) > 1:
            # The legend ends far from the heading of the peaks, which would read as a part of it.
            look = {"loc": "lower right", "bbox_to_anchor": (0.93, 0.97), "frameon": False, "fontsize": 9}
            panel.legend(ncols=len(timelines), borderpad=0.0, borderaxespad=0.2, **look)
        self._beside(panel, 0, "peak" if len(timelines) == 1 else "peaks", above=7)


def timeline_values(timeline: Timeline, durations: Durations) -> dict[str, Any]:
    """Collect the simulation's results for JSON, and the times of a stage and of a message that it was made with."""
    return {
        "schedule": timeline.schedule.name,
        "stages": len(timeline.ranks),
        "virtual_stages": stages_per_rank(timeline),
        "microbatches": timeline.schedule.microbatches,
        "bubble_fraction": float(timeline.bubble_fraction),
        "bubble_rate": float(bubble_rate(timeline)),
        "makespan": float(timeline.makespan),
        "peak_activations": timeline.peak_activations,
        "times": {
            "forward": float(durations.forward),
            "backward_input": float(durations.backward_input),
            "backward_weight": float(durations.backward_weight),
            "comm": float(durations.comm),
        },
    }
