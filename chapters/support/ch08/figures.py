"""Draw for chapter 8: warm-up, overlap, memory, operations, weight versions, and the sliders at its end."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from matplotlib.patches import Rectangle

from chapters.support.ch08.exchange import ExchangeDurations
from chapters.support.draw import RANKS, box, finish, note
from chapters.support.schedule_lists import count_sends
from chapters.support.schedule_paths import Named
from chapters.support.show import in_notebook
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Time, peak_live, simulate
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from visualize.schedule import NAMES, gallery, plot_schedule
from visualize.style import COLOURS, INK, WINE, Picture, at_lightness, picture

PALE = {"F": 64, "B": 86}  # the lightness of a rank's second stage
VERSIONS = (*RANKS, WINE)  # a colour for each version of the weights


def picture_of(name: str, p: int, m: int, v: int, durations: Durations) -> Picture:
    """Simulate and draw one schedule; `v` counts for interleaved-1f1b only."""
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    return plot_schedule(simulate(schedule, durations))


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
            colour = COLOURS[kind] if stage < p else at_lightness(COLOURS[kind], PALE[kind])
            look = {"edgecolor": "white", "linewidth": 0.8}
            box(axes, (float(begin), stage % p), (float(until - begin), 0.8), colour, str(microbatch), **look)
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


def plot_overlap(p: int, m: int, steps: int = 12) -> Picture:
    """Draw a step's time with ZB-V and with DualPipeV over the share of all-to-alls in the forward of a stage.

    F and I are 1 of computation and x of all-to-alls, and W is 1; x grows from 0 to 1, and then F is half all-to-alls.
    The time is divided by that of the computation alone, which is 6m.
    """
    figure = picture(6.4, 3.2)
    axes = figure.subplots()
    parts = [Fraction(i, steps) for i in range(steps + 1)]
    for name, colour in (("zbv", COLOURS["B"]), ("dualpipev", COLOURS["F"])):
        lines = [simulate(make(name, p, m), ExchangeDurations(1 + x, 1 + x, 1, exchange=x)) for x in parts]
        times = [float(line.makespan / (6 * m)) for line in lines]
        axes.plot([float(100 * x / (1 + x)) for x in parts], times, color=colour, label=NAMES[name])
    axes.set_xlabel(f"share of all-to-alls in F, % (p = {p}, m = {m})", color=INK)
    axes.set_ylabel("time / computation", color=INK)
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    return figure


def plot_memory_and_bubble(points: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw each schedule as a point: its activations in units of a rank's layers, and its bubble.

    The name is on the right of its point, and on the left where another point would be in its way.
    """
    figure = picture(6.0, 3.2)
    axes = figure.add_subplot()
    for name, spot in points.items():
        axes.plot(*spot, marker="o", color=COLOURS["F"])
        is_blocked = any(0 < x - spot[0] < 1 and abs(y - spot[1]) < 0.1 for x, y in points.values())
        side, shift = ("right", -6) if is_blocked else ("left", 6)
        note(axes, name, spot, (shift, 0), fontsize=8, ha=side, va="center")
    finish(axes, xlabel="activations alive on a rank, at most", ylabel="bubble", xlim=(0, 9.6), ylim=(0, 0.85))
    return figure


def schedule_table(p: int, m: int) -> str:
    """Tabulate every schedule: bubbles, memory and messages, with equal times and with T_F, T_I, T_W = 4, 5, 3.

    Activations are in units of one rank's layers for one microbatch. Counted until I they are what a forward keeps,
    counted until W also what a W that is put off still needs.
    The least and the most of all ranks.
    """
    rows = [
        f"p = {p}, m = {m}         idle / total    idle /   activations at most    times 4, 5, 3:  messages",
        "                                   ideal       until I     until W    idle / total    per step",
    ]
    others = gallery(p, m, Durations(4, 5, 3))
    for name, timeline in gallery(p, m).items():
        sends, v = sum(count_sends(timeline.schedule)), timeline.schedule.stages // p
        bubble, other = Fraction(timeline.bubble_fraction), others[name].bubble_fraction
        until_input = range_text([peak / v for peak in timeline.peak_activations])
        until_weight = range_text([peak_live(actions, freed_by=("B", "W")) / v for actions in timeline.schedule.ranks])
        row = f"{name:<18} {bubble!s:>5} = {float(bubble):.3f}   {float(bubble / (1 - bubble)):.3f}"
        rows.append(f"{row} {until_input:>12} {until_weight:>11} {other!s:>11} = {float(other):.3f} {sends:>9}")
    return "\n".join(rows)


def range_text(values: Sequence[float]) -> str:
    """Return the least and the most of some values, or the one that all are."""
    if min(values) == max(values):
        return f"{max(values):g}"
    return f"{min(values):g} to {max(values):g}"


def plot_operations(lengths: Sequence[int], operations: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the operations of F, I and W over the length of the sequence, in units of W's."""
    figure = picture(6.0, 2.7)
    axes = figure.add_subplot()
    for kind, values in operations.items():
        ratios = [value / weight for value, weight in zip(values, operations["W"], strict=True)]
        axes.plot(lengths, ratios, marker="o", markersize=4, color=COLOURS[kind], label=kind)
    finish(axes, legend="upper left", xlabel="tokens in a sample, T", ylabel="operations / those of W", ylim=(0, None))
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
                box(axes, (float(begin), stage), size, VERSIONS[version % len(VERSIONS)], "", **look)
                middle = float(begin + until) / 2
                label = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                text = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "bbox": label}
                axes.text(middle, stage + 0.43, str(version), **text)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_yticks([s + 0.43 for s in range(rows)], [f"stage {s}" for s in range(rows)], fontsize=8)
        axes.set(xlim=(-0.05, end), ylim=(rows, -0.1), xticks=[])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("time (digit in a box: the version of the weights; hatched: backward)", fontsize=8)
    return figure


def explore_schedules() -> Any:
    """Show sliders for p, m, v, schedule and times in a notebook with ipywidgets, and the picture that follows them.

    A static picture comes first: a page made of the notebook, as GitHub's, shows it and has no sliders. The sliders
    begin with its settings. Elsewhere (in a script, without ipywidgets) return that picture: ZB-H1 for p = 4, m = 8,
    times 4, 5, 3.
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
        return ipywidgets.FloatSlider(value=value, min=low, max=8, step=0.1, description=label, **looks)

    controls = {
        "name": ipywidgets.Dropdown(options=names, value="zb-h1", description="schedule", style=looks["style"]),
        "p": number("ranks p", 4, 8),
        "m": number("microbatches m", 8, 32),
        "v": number("interleaved: v", 2, 4),
        "forward": time("F", 4),
        "backward_input": time("I, input gradient", 5),
        "backward_weight": time("W, weights", 3),
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
