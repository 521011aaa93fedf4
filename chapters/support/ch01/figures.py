"""Draw the figure of section 1.1: a small graph with its values, its gradients and the order of backward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from visualize.style import BLUE, INK, PAPER, VERMILION, Picture, picture


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
        start, end, bend = (x1, -HEIGHT / 2), (x2 + 0.25 * (x1 > x2) * WIDTH, y2 + HEIGHT / 2), 0.0
        spot = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    arrow = f"arc3,rad={bend}"
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "color": VERMILION}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=arrow, **look))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(*spot, contribution, ha="center", va="center", color=VERMILION, fontsize=9, bbox=box, zorder=2.5)
