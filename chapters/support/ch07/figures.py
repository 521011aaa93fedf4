"""Draw for chapter 7: paths, warm-up, overlap, memory, messages, weight versions, and the sliders at its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from chapters.support.draw import RANKS, box, finish, legend_outside, note
from chapters.support.show import in_notebook
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Time, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize.boxes import KINDS
from visualize.schedule import NAMES, gallery, plot_schedule
from visualize.style import COLOURS, INK, PAPER, VERMILION, Picture, picture

Named = tuple[str, int, int]  # an action of a hand-written list: kind, microbatch, stage
PHASES = {"warm-up": ("#DDDDDD", "///"), "steady state": ("#FFFFFF", ""), "cool-down": ("#DDDDDD", "\\\\\\")}


@dataclass(frozen=True)
class MarkedPath:
    """A schedule of one stage per rank, with the chain of actions that is marked in it."""

    times: Mapping[Named, tuple[Time, Time]]  # start and end of each action
    path: Sequence[Named]
    pieces: Sequence[tuple[str, Time]]  # the name and the length of each piece of the path, in order
    ahead: Sequence[int] | None = None  # forwards of each rank's warm-up; the phases are drawn if this is given

    def __post_init__(self) -> None:
        spans = [self.times[action] for action in self.path]
        makespan = max(end for _, end in self.times.values())
        lengths = sum(end - start for start, end in spans), sum(length for _, length in self.pieces)
        if lengths != (makespan, makespan):
            raise UsageError(f"the path and its pieces take {lengths}, but the schedule {makespan}")


def plot_paths(panels: Mapping[str, MarkedPath], note: str) -> Picture:
    """Draw schedules one above the other: boxes with their microbatch, a thick frame around each action of the path.

    Below each schedule are the pieces of its path. `panels` gives each schedule its title; `note` names the times.
    """
    figure = picture(7.0, 0.75 + sum(0.95 + _rows(one) * (0.42 if one.ahead else 0.27) for one in panels.values()))
    heights = [1.6 + _rows(one) * (1.5 if one.ahead else 1.0) for one in panels.values()]
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    span = max(float(end) for one in panels.values() for _, end in one.times.values())
    for axes, (title, one) in zip(grid, panels.items(), strict=True):
        axes.set_xlim(-0.004 * span, 1.004 * span)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.set_xticks([])
        _draw_path(axes, one)
    kinds = [kind for kind in KINDS if any(kind == named[0] for one in panels.values() for named in one.times)]
    handles = [Patch(facecolor=COLOURS[kind], label=KINDS[kind]) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=2, label="longest path"))
    legend_outside(figure, handles, "lower center", fontsize=8.5)
    grid[-1].set_xlabel(f"time ({note}; number in a box: its microbatch)", fontsize=8.5, color=INK)
    return figure


def _rows(one: MarkedPath) -> int:
    return 1 + max(stage for _, _, stage in one.times)


def _draw_path(axes: Axes, one: MarkedPath) -> None:
    """Draw the ranks' boxes, their phases below them, and the pieces of the path below all ranks."""
    rows, step = _rows(one), 1.5 if one.ahead else 1.0
    marked = set(one.path)
    for (kind, microbatch, rank), (begin, end) in one.times.items():
        start, length, y = float(begin), float(end - begin), rank * step
        look = {"edgecolor": "white", "linewidth": 0.8, "zorder": 2}
        box(axes, (start, y + 0.05), (length, 0.9), COLOURS[kind], str(microbatch), **look)
        if (kind, microbatch, rank) in marked:
            frame = {"fill": False, "edgecolor": INK, "linewidth": 2.0, "zorder": 4}
            axes.add_patch(Rectangle((start, y + 0.05), length, 0.9, gid="path", **frame))
    for rank in range(rows):
        slots = sorted(times for named, times in one.times.items() if named[2] == rank)
        if one.ahead:
            _draw_phases(axes, slots, one.ahead[rank], rank * step + 1.03)
    bottom, at = rows * step, 0.0
    axes.set_ylim(bottom + 1.5, -0.1)
    axes.set_yticks([rank * step + 0.5 for rank in range(rows)], [f"rank {rank}" for rank in range(rows)], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    for name, length in one.pieces:
        end = at + float(length)
        arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (end, bottom + 0.4), (at, bottom + 0.4), arrowprops=arrow, annotation_clip=False)
        for place in (at, end):
            axes.plot([place, place], [0, bottom + 0.55], color=INK, linewidth=0.7, linestyle=":", zorder=1)
        axes.text((at + end) / 2, bottom + 0.62, name, ha="center", va="top", fontsize=8.5, color=INK, gid="piece")
        at = end


def _draw_phases(axes: Axes, slots: Sequence[tuple[Time, Time]], ahead: int, y: float) -> None:
    """Draw a strip with warm-up, steady state and cool-down below a rank's boxes, from its first action to its last."""
    turns = [slots[0][0], slots[ahead][0], slots[len(slots) - ahead - 1][1], slots[-1][1]]
    for (name, (colour, hatch)), start, end in zip(PHASES.items(), turns[:-1], turns[1:], strict=True):
        if end > start:
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "#888888", "linewidth": 0.6, "zorder": 2}
            axes.add_patch(Rectangle((float(start), y), float(end - start), 0.34, gid=name, **look))
            label = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            if float(end - start) >= 3:
                text = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 3, "bbox": label}
                axes.text(float(start + end) / 2, y + 0.17, name, **text)


def picture_of(name: str, p: int, m: int, v: int, durations: Durations) -> Picture:
    """Simulate and draw one schedule; `v` counts for interleaved-1f1b only."""
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    return plot_schedule(simulate(schedule, durations))


def plot_overlap(p: int, m: int, steps: int = 12) -> Picture:
    """Draw a step's time with ZB-V and with DualPipeV over the share of all-to-alls in the forward of a stage.

    F and I are 1 of computation and x of all-to-alls, and W is 1; x grows from 0 to 1, and then F is half all-to-alls.
    The time is divided by that of the computation alone, which is 6m.
    """
    figure = picture(6.4, 3.2)
    axes = figure.subplots()
    parts = [Fraction(i, steps) for i in range(steps + 1)]
    for name, colour in (("zbv", COLOURS["B"]), ("dualpipev", COLOURS["F"])):
        lines = [simulate(make(name, p, m), Durations(1 + x, 1 + x, 1, exchange=x)) for x in parts]
        times = [float(line.makespan / (6 * m)) for line in lines]
        axes.plot([float(100 * x / (1 + x)) for x in parts], times, color=colour, label=NAMES[name])
    axes.set_xlabel(f"share of all-to-alls in F, % (p = {p}, m = {m})", color=INK)
    axes.set_ylabel("time / computation", color=INK)
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    return figure


def schedule_table(p: int, m: int) -> str:
    """Tabulate every schedule: bubbles, memory and messages, with equal times and with T_F, T_I, T_W = 4, 5, 3.

    Activations and waiting W are in units of one rank's layers for one microbatch.
    """
    rows = [
        f"p = {p}, m = {m}         idle / total    idle /   activations  W waiting   times 4, 5, 3:  messages",
        "                                   ideal    at most      at most     idle / total    per step",
    ]
    others = gallery(p, m, Durations(4, 5, 3))
    for name, timeline in gallery(p, m).items():
        report, v = check(timeline.schedule), timeline.schedule.stages // p
        bubble, other = Fraction(timeline.bubble_fraction), others[name].bubble_fraction
        peak, waiting = max(report.peak_activations) / v, max(report.peak_weight_gradients) / v
        row = f"{name:<18} {bubble!s:>5} = {float(bubble):.3f}   {float(bubble / (1 - bubble)):.3f}"
        rows.append(f"{row} {peak:>9g} {waiting:>12g} {other!s:>11} = {float(other):.3f} {sum(report.sends):>9}")
    return "\n".join(rows)


def explore_schedules() -> Any:
    """Show sliders for p, m, v, schedule and times in a notebook with ipywidgets, and the picture that follows them.

    A static picture comes first: a page made of the notebook, as GitHub's, shows it and has no sliders. Elsewhere (in a
    script, without ipywidgets) return that picture: ZB-H1 for p = 4, m = 8, times 4, 5, 3.
    """
    static = picture_of("zb-h1", 4, 8, 1, Durations(4, 5, 3))
    if not in_notebook():
        return static
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return static
    display(static)

    looks = {"continuous_update": False, "style": {"description_width": "9em"}}
    names = [(NAMES.get(name, name), name) for name in SCHEDULES]

    def number(label: str, value: int, high: int) -> Any:
        return ipywidgets.IntSlider(value=value, min=1, max=high, description=label, **looks)

    def time(label: str, value: float, low: float = 0.1) -> Any:
        return ipywidgets.FloatSlider(value=value, min=low, max=4, step=0.1, description=label, **looks)

    controls = {
        "name": ipywidgets.Dropdown(options=names, value="1f1b", description="schedule", style=looks["style"]),
        "p": number("ranks p", 4, 8),
        "m": number("microbatches m", 8, 32),
        "v": number("interleaved: v", 2, 4),
        "forward": time("F", 1),
        "backward_input": time("I, input gradient", 1),
        "backward_weight": time("W, weights", 1),
        "comm": time("message", 0, 0),
    }

    def follow(name: str, p: int, m: int, v: int, **times: float) -> None:
        exact: dict[str, Time] = {key: Fraction(str(round(value, 3))) for key, value in times.items()}
        try:
            display(picture_of(name, p, m, v, Durations(**exact)))
        except UsageError as error:
            print(error)

    shown = ipywidgets.interactive_output(follow, controls)
    columns = [list(controls.values())[:4], list(controls.values())[4:]]
    box = ipywidgets.VBox([ipywidgets.HBox([ipywidgets.VBox(column) for column in columns]), shown])
    view = box._repr_mimebundle_()
    view["text/plain"] = "(Here a running notebook has sliders for p, m, v, the schedule and the times.)"
    display(view, raw=True)
    return None


def plot_warm_up(times: Mapping[Named, tuple[Time, Time]], p: int, rank: int, stages: int, end: float) -> Picture:
    """Draw the beginning of an interleaved schedule, and count one rank's forwards before its first backward.

    The thick boxes are microbatch 0 on its way from the rank's last stage to the last rank and back. Boxes of the later
    stages are paler. `end` is the time at which the picture ends.
    """
    figure = picture(7.5, 0.62 * p + 1.3)
    axes = figure.add_subplot()
    first = stages - p + rank  # the rank's last stage
    on_the_way = {("F", 0, s) for s in range(first, stages)} | {("B", 0, s) for s in range(first, stages)}
    for (kind, microbatch, stage), (begin, until) in times.items():
        if until <= end:
            look = {"edgecolor": "white", "linewidth": 0.8, "alpha": 1.0 if stage < p or kind == "B" else 0.6}
            box(axes, (float(begin), stage % p), (float(until - begin), 0.8), COLOURS[kind], str(microbatch), **look)
        if (kind, microbatch, stage) in on_the_way:
            frame = {"fill": False, "edgecolor": INK, "linewidth": 2.2, "zorder": 4}
            axes.add_patch(Rectangle((float(begin), stage % p), float(until - begin), 0.8, gid="way", **frame))
    start, turn, back = (float(times[named][0]) for named in (("F", 0, rank), ("F", 0, first), ("B", 0, first)))
    hops = 2 * (p - 1 - rank)
    spans = (
        (start, turn, f"{turn - start:g} forwards: the\nfirst group, stage {rank}"),
        (turn, turn + hops, f"{hops} forwards: {hops // 2} hops down,\n{hops // 2} hops back"),
        (turn + hops, back, "the pair's\nforward"),
    )
    for left, right, text in spans:
        arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (right, p + 0.15), (left, p + 0.15), arrowprops=arrow, annotation_clip=False)
        axes.text((left + right) / 2, p + 0.3, text, ha="center", va="top", fontsize=8, color=INK, gid="span")
        for place in (left, right):
            axes.plot([place, place], [rank, p + 0.25], color=INK, linewidth=0.7, linestyle=":", zorder=1)
    axes.set_yticks([r + 0.4 for r in range(p)], [f"rank {r}" for r in range(p)], fontsize=8.5)
    axes.set(xlim=(-0.05, end), ylim=(p + 1.1, -0.1), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_crossing(lists: Sequence[Sequence[str]], stopped: Sequence[int]) -> Picture:
    """Draw two ranks' lists with their messages as arrows, and mark the send at which each rank is stopped.

    lists    the actions of rank 0 and of rank 1, such as 0SEND_F1 and 1RECV_F1
    stopped  the place in each list of the action that never ends
    """
    figure = picture(7.5, 2.6)
    axes = figure.add_subplot()
    places: dict[tuple[int, str], float] = {}
    for rank, actions in enumerate(lists):
        for place, action in enumerate(actions):
            name = action[1:]  # without the stage
            is_message = "_" in name
            colour = PAPER if is_message else COLOURS[name[0]]
            look: dict[str, Any] = {"edgecolor": "white"}
            if place == stopped[rank]:
                look = {"edgecolor": VERMILION, "linewidth": 2.5}
            if place > stopped[rank]:
                look = {"edgecolor": "white", "alpha": 0.45}
            box(axes, (place + 0.04, 2 * rank), (0.92, 0.7), colour, name.replace("_", "\n"), va="center", **look)
            places[rank, name] = place + 0.5
    for (rank, name), place in places.items():
        if name.startswith("SEND_"):
            other = places[1 - rank, name.replace("SEND", "RECV")]
            waits = place == stopped[rank] + 0.5
            ends = (0.72, 1.98) if rank == 0 else (1.98, 0.72)
            colour = VERMILION if waits else INK
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.0 if waits else 1.0}
            axes.annotate("", (other, ends[1]), (place, ends[0]), arrowprops=arrow)
    axes.set_yticks([0.35, 2.35], ["rank 0", "rank 1"], fontsize=9)
    axes.set(xlim=(0, max(len(actions) for actions in lists)), ylim=(2.75, -0.1), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_versions(
    times: Mapping[Named, tuple[Time, Time]], rules: Mapping[str, Callable[[int, int], int]], end: float
) -> Picture:
    """Draw which version of its weights each stage uses: a panel for each rule, the version in each box.

    rules  by title, what returns the version for (stage, microbatch)
    """
    rows = 1 + max(stage for _, _, stage in times)
    figure = picture(7.5, (0.36 * rows + 0.5) * len(rules))
    panels = figure.subplots(len(rules), 1, squeeze=False)[:, 0]
    for axes, (title, version_of) in zip(panels, rules.items(), strict=True):
        for (kind, microbatch, stage), (begin, until) in times.items():
            if until <= end:
                version = version_of(stage, microbatch)
                look = {"edgecolor": "white", "hatch": "///" if kind == "B" else None}
                size = (float(until - begin), 0.86)
                box(axes, (float(begin), stage), size, RANKS[version % len(RANKS)], "", **look)
                middle = float(begin + until) / 2
                label = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                text = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "bbox": label}
                axes.text(middle, stage + 0.43, str(version), **text)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_yticks([s + 0.43 for s in range(rows)], [f"stage {s}" for s in range(rows)], fontsize=8)
        axes.set(xlim=(-0.05, end), ylim=(rows, -0.1), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def plot_memory_and_bubble(points: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw each schedule as a point: its activations in units of a rank's layers, and its bubble."""
    figure = picture(6.0, 3.2)
    axes = figure.add_subplot()
    for name, spot in points.items():
        axes.plot(*spot, marker="o", color=COLOURS["F"])
        is_beside = any(0 < spot[0] - x < 1 and y == spot[1] for x, y in points.values())
        note(axes, name, spot, (5, -12 if is_beside else 4), fontsize=8)  # its neighbour's name is above
    finish(axes, xlabel="activations alive on a rank, at most", ylabel="bubble", xlim=(0, 9.6), ylim=(0, 0.85))
    return figure


def plot_operations(lengths: Sequence[int], operations: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the operations of F, I and W over the length of the sequence, in units of W's."""
    figure = picture(6.0, 2.7)
    axes = figure.add_subplot()
    for kind, values in operations.items():
        ratios = [value / weight for value, weight in zip(values, operations["W"], strict=True)]
        axes.plot(lengths, ratios, marker="o", markersize=4, color=COLOURS[kind], label=kind)
    finish(axes, legend="upper left", xlabel="tokens in a sample, T", ylabel="operations / those of W", ylim=(0, None))
    return figure
