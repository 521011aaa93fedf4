"""The loss curve of a run, from the metrics that `minipar.train --metrics` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from minipar.errors import UsageError
from visualize.style import GREY, LINES, Picture, picture, read_text, tidy

SMOOTHING = 20  # steps in the moving average drawn over a noisy curve


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The rows of a metrics file, one JSON object per line. UsageError names the line that is not one."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error.msg}") from None
        if not (isinstance(row, dict) and isinstance(row.get("loss"), (int, float)) and "step" in row):
            raise UsageError(f"{path}, line {number} has no step and loss: not written by minipar.train --metrics")
        rows.append(row)
    if not rows:
        raise UsageError(f"{path} holds no steps")
    return rows


def plot_loss(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], reference: float | None = None, reference_label: str = ""
) -> Picture:
    """Loss in nats per token against the step, one line per run ({label: rows with step and loss}).

    `reference` draws a level to compare with: the entropy of single-byte frequencies, say, which a model beats only
    by looking at what came before.
    """
    figure = picture(7.0, 4.0)
    axes = figure.add_subplot()
    for (label, rows), colour in zip(runs.items(), LINES * len(runs), strict=False):
        steps, losses = [row["step"] for row in rows], [float(row["loss"]) for row in rows]
        if len(losses) > 3 * SMOOTHING:
            last = math.fsum(losses[-SMOOTHING:]) / SMOOTHING
            axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.35)
            text = f"{label}: {losses[0]:.3f} at first, {last:.3f} over the last {SMOOTHING} steps"
            axes.plot(steps, _smooth(losses), color=colour, linewidth=2.0, label=text)
        else:
            text = f"{label}: {losses[0]:.3f} at first, {losses[-1]:.3f} at last"
            axes.plot(steps, losses, color=colour, linewidth=1.8, label=text)
        if len(losses) == 1:
            axes.plot(steps, losses, "o", color=colour)
    if reference is not None:
        axes.axhline(
            reference, color=GREY, linestyle="--", linewidth=1.5, label=f"{reference_label} {reference:.3f}".strip()
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)
    tidy(axes)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of up to SMOOTHING values around each; at the start, where loss falls fast, as many before as after."""
    smooth = []
    for i in range(len(values)):
        left = min(SMOOTHING // 2, i)
        around = values[i - left : i + left + 1]  # at the end, whatever is left
        smooth.append(math.fsum(around) / len(around))
    return smooth
