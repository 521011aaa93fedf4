"""The loss curve of a run, from the metrics that `minipar.train --metrics` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minipar.errors import UsageError
from visualize.style import GREY, LINES, NOT_A_ROW, Picture, number, parse_json, picture, read_text, tidy

SMOOTHING = 20  # steps in the moving average drawn over a noisy curve


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, one JSON object per line. UsageError names the line that is not one."""
    rows = []
    for line, text in enumerate(read_text(path).splitlines(), start=1):
        row = parse_json(text, path, line)
        try:
            number(row["step"], 0)
            rows.append(row | {"loss": float("nan") if row["loss"] != row["loss"] else number(row["loss"])})
        except NOT_A_ROW:
            foreign = "not written by minipar.train --metrics"
            raise UsageError(f"{path}, line {line} has no step and loss: {foreign}") from None
    if not rows:
        raise UsageError(f"{path} holds no steps")
    return rows


def plot_loss(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], reference: float | None = None, reference_label: str = ""
) -> Picture:
    """Draw loss in nats per token against the step, counted from 1, for each run ({label: rows with step and loss}).

    `reference` draws a level to compare with: the entropy of single-byte frequencies, say, which a model beats only
    by looking at what came before.
    """
    figure = picture(7.0, 4.0)
    axes = figure.add_subplot()
    for (label, rows), colour in zip(runs.items(), LINES * len(runs), strict=False):
        steps, losses = [row["step"] + 1 for row in rows], [float(row["loss"]) for row in rows]
        name = label if not label.startswith("_") else f" {label}"  # matplotlib hides labels that begin with "_"
        if len(losses) > 3 * SMOOTHING:
            last = math.fsum(losses[-SMOOTHING:]) / SMOOTHING
            axes.plot(steps, losses, color=colour, linewidth=0.9, alpha=0.45, label=f"{name}: each step")
            text = f"{name}: mean of {SMOOTHING} steps around; {losses[0]:.3f} at first, {last:.3f} at last"
            axes.plot(steps, _smooth(losses), color=colour, linewidth=2.0, label=text)
        else:
            text = f"{name}: {losses[0]:.3f} at first, {losses[-1]:.3f} at last"
            axes.plot(steps, losses, color=colour, linewidth=1.8, label=text)
        if len(losses) == 1:
            axes.plot(steps, losses, "o", color=colour)
    if reference is not None:
        text = f"{reference_label} {reference:.3f}".strip()
        axes.axhline(reference, color=GREY, linestyle="--", linewidth=1.5, label=text)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """Average up to SMOOTHING values around each one; fewer at the start, where the loss falls fast and bends."""
    averages = []
    for i in range(len(values)):
        reach = min(SMOOTHING // 2, i // 4)
        around = values[i - reach : i + reach + 1]  # at the end fewer values follow
        averages.append(math.fsum(around) / len(around))
    return averages
