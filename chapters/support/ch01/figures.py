"""Draw for chapter 1: a small graph with its gradients (1.1), steps of a difference quotient (1.2), LayerNorm (1.5)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from chapters.support.draw import finish
from visualize.style import BLUE, GREEN, INK, PAPER, VERMILION, Picture, picture


class Result(Protocol):
    """A tensor after backward: its number, its value, its gradient, and its inputs with a rule for each."""

    number: int
    data: float
    grad: float
    inputs: Sequence[Any]
    rules: Sequence[Callable[[float], float]]


WIDTH, HEIGHT, STEP, DROP = 1.6, 0.9, 2.9, 2.3  # a box's sides, and the ways from one box to the next
ORDINALS = ("1st", "2nd", "3rd")


def plot_backward(graph: Mapping[str, Result]) -> Picture:
    """Draw a graph after backward: operations in the order of their numbers from left to right, leaves below.

    graph: {how a tensor was computed, such as "a = x w": the tensor}. Each arrow carries the contribution that backward
    sends from a user to its input. An operation says when backward visits it, and a leaf how many contributions
    complete it.
    """
    figure = picture(7.0, 3.6)
    axes = figure.add_subplot()
    tensors = sorted(graph.items(), key=lambda item: item[1].number)
    operations = [(text, tensor) for text, tensor in tensors if tensor.inputs]
    leaves = [(text, tensor) for text, tensor in tensors if not tensor.inputs]
    places = {id(tensor): (STEP * i, 0.0) for i, (_, tensor) in enumerate(operations)}
    places |= {id(leaf): (STEP * i, -DROP) for i, (_, leaf) in enumerate(leaves)}
    counts = dict.fromkeys(places, 0)
    for _, user in operations:
        for used, rule in zip(user.inputs, user.rules, strict=True):
            counts[id(used)] += 1
            _draw_edge(axes, places[id(user)], places[id(used)], f"{rule(user.grad):g}")
    for i, (text, tensor) in enumerate(operations):
        visit = len(operations) - i
        _draw_box(axes, places[id(tensor)], text, tensor)
        note = f"visited {ORDINALS[visit - 1] if visit <= len(ORDINALS) else f'{visit}th'}"
        axes.text(STEP * i - WIDTH / 2, -HEIGHT / 2 - 0.2, note, va="center", fontsize=8.5)
    for text, leaf in leaves:
        x, y = places[id(leaf)]
        _draw_box(axes, (x, y), text, leaf, "--")
        count = counts[id(leaf)]
        note = f"complete after {count} contribution{'s' if count > 1 else ''}"
        axes.text(x, y - HEIGHT / 2 - 0.2, note, ha="center", va="center", fontsize=8.5)
    axes.set_xlim(-WIDTH / 2 - 0.3, STEP * (len(operations) - 1) + WIDTH / 2 + 0.3)
    axes.set_ylim(-DROP - HEIGHT / 2 - 0.4, HEIGHT / 2 + 0.1 * STEP * (len(operations) - 1) + 0.25)
    axes.set_axis_off()
    return figure


def _draw_box(axes: Axes, place: tuple[float, float], text: str, tensor: Result, line: str = "-") -> None:
    """Draw a tensor's box with its text, its value and its gradient."""
    x, y = place
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    look: dict[str, Any] = {
        "facecolor": "white" if line == "-" else PAPER,
        "edgecolor": INK,
        "linestyle": line,
        "zorder": 3,
    }
    axes.add_patch(Rectangle(corner, WIDTH, HEIGHT, **look))
    lines = (
        (f"{tensor.number}:  {text}", INK),
        (f"value {tensor.data:g}", BLUE),
        (f"gradient {tensor.grad:g}", VERMILION),
    )
    for shift, (words, colour) in zip((0.28, 0.0, -0.28), lines, strict=True):
        axes.text(x, y + shift, words, ha="center", va="center", color=colour, fontsize=9, zorder=4)


def _draw_edge(axes: Axes, user: tuple[float, float], used: tuple[float, float], contribution: str) -> None:
    """Draw the arrow along which backward sends a contribution from a user to its input."""
    (x1, y1), (x2, y2) = user, used
    if y1 == y2 and x1 - x2 > STEP:  # above the nodes between
        start, end, bend = (x1, HEIGHT / 2), (x2, HEIGHT / 2), 0.2
        spot = ((x1 + x2) / 2, HEIGHT / 2 + 0.1 * (x1 - x2))
    elif y1 == y2:
        start, end, bend = (x1 - WIDTH / 2, 0.0), (x2 + WIDTH / 2, 0.0), 0.0
        spot = ((start[0] + end[0]) / 2, 0.0)
    else:
        aside = 0.25 * WIDTH if x1 > x2 else 0.0
        start, end, bend = (x1, -HEIGHT / 2), (x2 + aside, y2 + HEIGHT / 2), 0.0
        spot = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    arrow = f"arc3,rad={bend}"
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "color": VERMILION}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=arrow, **look))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(*spot, contribution, ha="center", va="center", color=VERMILION, fontsize=9, bbox=box, zorder=2.5)


@dataclass
class Value:
    """A tensor of the graph of section 1.1, after backward."""

    number: int
    data: float
    grad: float
    inputs: Sequence[Any] = ()
    rules: Sequence[Callable[[float], float]] = ()


def plot_small_graph() -> Picture:
    """Draw the first page's graph, c = (x w) (x w + x) with w = 3 and x = 2, and its gradients."""
    w = Value(0, 3.0, 28.0)
    x = Value(1, 2.0, 48.0)
    a = Value(2, 6.0, 14.0, (x, w), (lambda g: g * 3, lambda g: g * 2))
    b = Value(3, 8.0, 6.0, (a, x), (lambda g: g, lambda g: g))
    c = Value(4, 48.0, 1.0, (a, b), (lambda g: g * 8, lambda g: g * 6))
    return plot_backward({"w (a leaf)": w, "x (a leaf)": x, "a = x w": a, "b = a + x": b, "c = a b": c})


def plot_steps(steps: Sequence[float], errors: Sequence[float]) -> Picture:
    """Draw the relative error of a difference quotient against its step."""
    figure = picture(6.0, 2.8)
    axes = figure.add_subplot()
    axes.loglog(steps, errors, "o", color=BLUE, markersize=5, label="measured")
    large = [step for step in steps if step >= 1e-6]
    small = [step for step in steps if step <= 1e-4]
    truncation = [errors[-1] * (step / steps[-1]) ** 2 for step in large]
    rounding = [errors[0] * steps[0] / step for step in small]
    axes.loglog(large, truncation, ":", color=INK, linewidth=1.4, label="truncation, as the square of the step")
    axes.loglog(small, rounding, "--", color=INK, linewidth=1.2, label="rounding, as 1 / step")
    finish(axes, legend="upper center", xlabel="step", ylabel="relative error")
    return figure


PATHS = {"directly": BLUE, "through rho": VERMILION, "through the mean": GREEN}
SPOTS = {"x": (0.0, 0.0), "mean": (1.6, -1.3), "centered": (3.2, 0.0), "rho": (4.8, -1.3), "xhat": (6.4, 0.0)}
NAMES = {
    "x": "$x$",
    "mean": r"$\bar x$, the mean",
    "centered": r"$\tilde x = x - \bar x$",
    "rho": r"$\rho$",
    "xhat": r"$\hat x = \rho\,\tilde x$",
}
BROUGHT = {
    (5.0, 0.2): ("directly", r"$\rho\,\hat g$"),
    (3.2, -0.95): ("through rho", r"$-\rho\,\hat x\;\overline{\hat g \hat x}$"),
    (0.0, -0.95): ("through the mean", r"$-\rho\;\overline{\hat g}$"),
}


def plot_three_paths(paths: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the ways on which LayerNorm's gradient comes back to x, and what came on each in one row.

    paths: {a key of PATHS: its contribution to each element of the row}. Their sum is drawn as marks.
    """
    figure = picture(7.5, 4.6)
    graph, bars = figure.subplots(2, 1, height_ratios=[1.1, 1])
    _draw_way(graph, "xhat", "centered", "directly")
    _draw_way(graph, "centered", "x", "directly")
    _draw_way(graph, "xhat", "rho", "through rho")
    _draw_way(graph, "rho", "centered", "through rho")
    _draw_way(graph, "centered", "mean", "through the mean")
    _draw_way(graph, "mean", "x", "through the mean")
    for name, (x, y) in SPOTS.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": INK}
        graph.text(x, y, NAMES[name], ha="center", va="center", fontsize=9.5, bbox=box, zorder=4)
    for (x, y), (path, text) in BROUGHT.items():
        graph.text(x, y, text, ha="center", va="center", fontsize=10, color=PATHS[path])
    graph.text(7.6, 0.0, r"$\hat g$", ha="left", va="center", fontsize=9)
    graph.add_patch(FancyArrowPatch((7.5, 0), (7.05, 0), arrowstyle="-|>", mutation_scale=12, color=INK))
    graph.set_xlim(-0.6, 8.4)
    graph.set_ylim(-1.8, 0.6)
    graph.set_axis_off()
    total = np.zeros(len(next(iter(paths.values()))))
    for place, (name, values) in enumerate(paths.items()):
        spots = np.arange(len(values)) + 0.27 * (place - 1)
        bars.bar(spots, values, width=0.25, color=PATHS[name], label=name)
        total += values
    bars.plot(np.arange(len(total)), total, "D", color=INK, markersize=4, label="sum: gradient of x")
    bars.axhline(0, color=INK, linewidth=0.8)
    finish(bars, xlabel="element of the row", ylabel="contribution", bars="x")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _draw_way(axes: Axes, start: str, end: str, path: str) -> None:
    """Draw an arrow on which a gradient comes back, between two boxes."""
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "color": PATHS[path], "linewidth": 1.8, "shrinkA": 14}
    axes.add_patch(FancyArrowPatch(SPOTS[start], SPOTS[end], shrinkB=28, **look))
