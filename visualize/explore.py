"""In a notebook: change a schedule, and the picture follows."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from minipar.errors import UsageError
from minipar.parallel.pipeline import SCHEDULES, Durations, make, simulate
from minipar.parallel.pipeline.simulate import Time
from visualize.schedule import NAMES, plot_schedule
from visualize.show import in_notebook
from visualize.style import Picture


def picture_of(name: str, p: int, m: int, v: int, durations: Durations) -> Picture:
    """One schedule simulated and drawn; `v` counts for interleaved-1f1b only."""
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    return plot_schedule(simulate(schedule, durations))


def explore_schedules() -> Any:
    """In a notebook with ipywidgets: sliders for p, m, v, schedule and times, and the picture that follows them.

    Elsewhere (in a script, without ipywidgets) the picture of 1F1B for p = 4, m = 8.
    """
    if not in_notebook():
        return picture_of("1f1b", 4, 8, 1, Durations())
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        return picture_of("1f1b", 4, 8, 1, Durations())

    looks = {"continuous_update": False, "style": {"description_width": "9em"}}

    def number(label: str, value: int, high: int) -> Any:
        return ipywidgets.IntSlider(value=value, min=1, max=high, description=label, **looks)

    def time(label: str, value: float, low: float = 0.1) -> Any:
        return ipywidgets.FloatSlider(value=value, min=low, max=4, step=0.1, description=label, **looks)

    controls = {
        "name": ipywidgets.Dropdown(
            options=[(NAMES.get(name, name), name) for name in SCHEDULES],
            value="1f1b",
            description="schedule",
            style=looks["style"],
        ),
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
    return ipywidgets.VBox([ipywidgets.HBox([ipywidgets.VBox(column) for column in columns]), shown])
