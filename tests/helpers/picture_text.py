"""A picture as text: one line for each element that is drawn, with its place, colour and words.

`PYTHONPATH=.:tests/helpers python -m picture_text` writes tests/visualize/recorded again: look at the difference, and
at the pictures, before it is committed.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from picture_cases import bench_rows, chrome, moments, rows, search

from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.schedules import make
from visualize import comparison, measurements, mesh, plan, schedule, style, timeline

RECORDED = Path(__file__).parents[1] / "visualize" / "recorded"
MOST = 8  # values that are written out; of more, the first, the last and a digest
NAMES = {value: name for name, value in vars(style).items() if isinstance(value, str) and value.startswith("#")}
NAMES |= {colour.upper(): f"AXIS {axis}" for axis, colour in style.AXIS_COLOURS.items()}


# ---- elements as text ------------------------------------------------------------------------------------------------


def values_text(values) -> str:
    """Write values with four digits, so that the last bits of a sum do not count."""
    array = np.asarray(values, dtype=float).round(6)
    words = [f"{value:.4g}" for value in array.reshape(-1) + 0.0]
    if len(words) <= MOST:
        return f"[{' '.join(words)}]"
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
    return f"{array.shape}[{words[0]} {words[1]} .. {words[-1]}] {digest}"


def colour_text(artist: Artist) -> str:
    """Write the name of an element's colour in visualize.style, so that a colour may change there."""
    get = getattr(artist, "get_facecolor", None) or getattr(artist, "get_color", None)
    if get is None:
        return ""
    found = get()
    several = isinstance(found, np.ndarray) and found.ndim == 2
    names = [NAMES.get(to_hex(colour).upper(), "other") for colour in (found if several else [found])]
    return " ".join(dict.fromkeys(names))


def place(artist: Artist) -> str:
    """Write where an element is, in the coordinates in which it is drawn, and its words."""
    if isinstance(artist, Line2D):
        return values_text(artist.get_xydata())
    if isinstance(artist, Text):
        arrow = getattr(artist, "arrow_patch", None)
        ends = values_text([*artist.xy, *artist.xyann]) if arrow is not None else values_text(artist.get_position())
        return f"{ends} {artist.get_text()!r}"
    if isinstance(artist, Collection):
        paths = [path.vertices for path in artist.get_paths()]
        return values_text(np.concatenate(paths)) if paths else values_text(artist.get_offsets())
    if isinstance(artist, AxesImage):
        return f"{values_text(artist.get_extent())} {values_text(artist.get_array())}"
    if isinstance(artist, Legend):
        return str([text.get_text() for text in artist.get_texts()])
    if isinstance(artist, Patch):
        path = artist.get_patch_transform().transform_path(artist.get_path())
        return values_text(path.vertices)
    return ""


def elements(axes: Axes) -> list[str]:
    """Write the elements of one panel."""
    found = [f"panel {axes.get_title(loc='left')!r}"]
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        ticks = [label.get_text() for label in axis.get_ticklabels()]
        limits = values_text(axis.get_view_interval())
        found.append(f"  {name} {axis.get_scale()} {limits} {axis.get_label_text()!r} {ticks}")
    for child in axes.get_children():
        is_empty = isinstance(child, Text) and not child.get_text()
        is_frame = child in (axes.patch, *axes.spines.values())
        if place(child) and child.get_visible() and not is_empty and not is_frame:
            found.append(f"  {type(child).__name__} {place(child)} {colour_text(child)}".rstrip())
    return found


def as_text(figure: Figure) -> str:
    """Write all that a picture shows."""
    FigureCanvasAgg(figure).draw()
    outside = (*figure.texts, *figure.legends, *figure.patches)
    found = [f"{type(child).__name__} {place(child)} {colour_text(child)}".rstrip() for child in outside]
    for axes in figure.axes:
        found += elements(axes)
    return "\n".join(found) + "\n"


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_timeline() -> Figure:
    data = chrome(ranks=4, steps=3)
    data["otherData"]["mesh"] = {"pp": 2, "dp": 2, "tp": 1}
    return timeline.plot_timeline(timeline.parse_trace(data), arrows=True)


def draw_mesh() -> Figure:
    """A ring along tp of three ranks, with little in the other direction; messages between stages."""
    ring = {("tp", 0, 1): [4, 3000], ("tp", 2, 0): [4, 2000], ("tp", 1, 2): [1, 30], ("tp", 2, 1): [1, 970]}
    return mesh.plot_mesh(mesh.MeshTraffic({"pp": 2, "dp": 1, "tp": 3}, 1, ring | {("pp", 0, 3): [1, 700]}))


def draw_loss() -> Figure:
    losses = [5 - 4 * i / (i + 50) + 0.1 * (i % 3) for i in range(300)]
    return measurements.plot_loss({"": rows(losses)}, 1.5, "entropy")


def draw_comparison() -> Figure:
    values = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
    ratios = {step: {f"p{i}": None if step < i else value for i, value in enumerate(values)} for step in range(4)}
    return comparison.plot_comparison(ratios)


# Of each kind one, small and of fixed values: why its text is recorded, and how it is drawn.
PICTURES: dict[str, tuple[str, Callable[[], Figure]]] = {
    "timeline": ("slices, waiting and arrows lie over one another in places that no formula says", draw_timeline),
    "mesh": ("lines and labels find their way between boxes by rules that only a picture shows", draw_mesh),
    "loss": ("the smoothed curve and its legend are what readers compare", draw_loss),
    "traffic": (
        "times, bytes and formulas of a benchmark share two panels",
        lambda: measurements.plot_bench(bench_rows()),
    ),
    "memory": (
        "areas are stacked by kind, and runs share one scale",
        lambda: measurements.plot_ledger({"a": moments(1), "b": moments(2)}),
    ),
    "plan": ("bars, points and numbers of the same plans stand in three panels", lambda: plan.plot_plan(search())),
    "comparison": ("a pixel's colour is a ratio, which no label repeats", draw_comparison),
    "schedule": (
        "boxes, numbers and the memory below them must stay at their times",
        lambda: schedule.plot_schedule(simulate(make("1f1b", 3, 5))),
    ),
}


def recorded_text(name: str) -> str:
    """Return a picture's recorded file: the reason for it in the first line, then its elements."""
    reason, draw = PICTURES[name]
    return f"# {reason}\n{as_text(draw())}"


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for title in PICTURES:
        (RECORDED / f"{title}.txt").write_text(recorded_text(title), encoding="utf-8")
