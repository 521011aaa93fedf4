"""Memory of a rank over one training step, by what it is for, from the file that `minipar.train --memory` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch

from minipar.errors import UsageError
from visualize.style import COLOURS, INK, NOT_A_ROW, Picture, byte_label, byte_unit, number, picture, read_json, tidy

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # minipar.memory's, from the bottom up
LedgerMoment = tuple[str, Sequence[int]]  # phase, bytes of each of KINDS
NARROWEST = 0.25  # of all moments: room for a phase's name


def read_ledger(path: str, rank: int = 0) -> Sequence[LedgerMoment]:
    """Read one rank's moments from a file of `minipar.train --memory`. UsageError for another file or rank."""
    data, foreign = read_json(path), "not written by minipar.train --memory"
    if not isinstance(data, dict) or not isinstance(data.get("ranks"), list) or not data["ranks"]:
        raise UsageError(f"{path} has no list of ranks: {foreign}")
    if data.get("kinds") != list(KINDS):
        raise UsageError(f"{path} has other kinds of memory than {', '.join(KINDS)}: {foreign}")
    try:
        ledgers = {
            int(one["rank"]): [(str(phase), [int(number(size, 0)) for size in held]) for phase, held in one["moments"]]
            for one in data["ranks"]
        }
    except NOT_A_ROW:
        raise UsageError(f"{path} has a rank without its moments: {foreign}") from None
    if rank not in ledgers:
        raise UsageError(f"--rank {rank}: {path} has ranks {min(ledgers)} to {max(ledgers)}")
    if not ledgers[rank] or any(len(held) != len(KINDS) for _, held in ledgers[rank]):
        raise UsageError(f"{path}, rank {rank}: expected moments of {len(KINDS)} numbers each: {foreign}")
    return ledgers[rank]


def plot_ledger(runs: Mapping[str, Sequence[LedgerMoment]], model_state: Mapping[str, int] | None = None) -> Picture:
    """Draw the memory of one rank over one step, stacked by kind, a panel for each run: {title: the ledger's moments}.

    The horizontal axis has the moments at which memory changed, in order, whatever time lies between them; a phase of
    few moments is widened to hold its name. `model_state` draws a dashed level in the panels that it names: the bytes
    of parameters, gradients and optimizer state by a formula.
    """
    top = max((sum(held) for moments in runs.values() for _, held in moments), default=0)
    unit, scale = byte_unit(top)
    figure = picture(max(5.0, 0.9 + 2.55 * len(runs)), 4.2)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (label, moments) in zip(panels, runs.items(), strict=True):
        _stack(axes, moments, scale)
        if model_state is not None and label in model_state:
            axes.axhline(model_state[label] / scale, color=INK, linestyle="--", linewidth=1.3)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("changes of memory, in order", fontsize=8)
    panels[0].set_ylim(0, 1.15 * max(top, 1) / scale)
    panels[0].set_ylabel(f"memory of one rank ({unit})")
    handles: list[Artist] = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS]
    if model_state:
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.3, label="model state, formula"))
    columns = min(len(handles), 3 if len(runs) < 3 else len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, moments: Sequence[LedgerMoment], scale: float) -> None:
    """Draw one panel: the areas, the phases and the peak."""
    spans = [(phase, len(list(group))) for phase, group in groupby(phase for phase, _ in moments)]
    least = NARROWEST * len(moments)
    places, bounds = [], [0.0]
    for _, count in spans:
        width = max(count, least)
        places += [bounds[-1] + width * i / count for i in range(count)]
        bounds.append(bounds[-1] + width)
    places.append(bounds[-1])  # the last moment lasts until here

    levels = [[0.0] * len(places)]
    for kind, held in zip(KINDS, zip(*(held for _, held in moments), strict=True), strict=True):
        levels.append([below + now / scale for below, now in zip(levels[-1], [*held, held[-1]], strict=True)])
        axes.fill_between(places, levels[-2], levels[-1], step="post", color=COLOURS[kind], linewidth=0)
    axes.step(places, levels[-1], where="post", color=INK, linewidth=0.8)

    for bound in bounds[1:-1]:
        axes.axvline(bound, color=INK, linewidth=0.8, linestyle=":")
    many = len(spans) > 3
    axes.set_xticks(
        [(start + end) / 2 for start, end in pairwise(bounds)],
        [phase for phase, _ in spans],
        fontsize=8,
        rotation=90 if many else 0,
    )
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, bounds[-1])
    tidy(axes)
    axes.grid(visible=False, axis="x")

    totals = levels[-1]
    peak = max(range(len(totals)), key=totals.__getitem__)
    share = places[peak] / bounds[-1]
    axes.plot(places[peak], totals[peak], marker=CARETDOWN, color=INK, markersize=7, clip_on=False)  # its tip is there
    axes.annotate(
        f"peak {byte_label(totals[peak] * scale)}",
        (places[peak], totals[peak]),
        xytext=(0, 10),
        textcoords="offset points",
        ha="left" if share < 0.35 else "right" if share > 0.65 else "center",
        fontsize=9,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )
