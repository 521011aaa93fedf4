"""The result of a search as a table and as JSON, and why the slower plans are slower."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minipar.errors import UsageError
from minipar.plan.command import train_command
from minipar.plan.layout import Layout
from minipar.plan.model import utilization
from minipar.plan.request import Request, assumptions
from minipar.plan.search import Candidate, Plan, SearchResult

SHOWN_MESHES = 200  # in the JSON
BYTE_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
NAMED_SHARE = 0.1  # a difference with a smaller share of the gap between two plans is not named
PARTS = {
    "compute": "computation (recomputed, in smaller products, or with more layers on the fullest rank)",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline messages",
    "dp": "data-parallel communication",
    "bubble": "pipeline bubble",
    "optimizer": "the optimizer's update",
}
Row = dict[str, str]  # the cells of a table's row by the names of their columns


# ---- JSON ----------------------------------------------------------------------------------------


def as_json(request: Request, result: SearchResult) -> dict[str, Any]:
    """Return everything as JSON: bytes, seconds, FLOP/s. `python -m visualize plan` reads it."""
    model = request.model
    cluster = request.cluster
    length = request.length
    plans = result.plans
    spread = request.spread
    own = {"precision": request.precision, "text": assumptions(request)}
    return {
        "model": {
            "name": request.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            **asdict(model),
        },
        "flops_per_sequence": {
            "model": model.model_flops(length),
            "hardware_selective_recompute": model.hardware_flops(length, "selective"),
            "hardware_full_recompute": model.hardware_flops(length, "full"),
        },
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.per_host,
        "gpu": {"name": request.gpu, **asdict(cluster.gpu)},
        "program": request.program,
        "spread": spread,
        "tied": [1 + plans.index(plan) for plan in tied(plans, spread)],
        "global_batch": request.global_batch,
        "seq_len": length,
        "tokens_per_step": request.tokens,
        "assumptions": asdict(cluster.assumptions) | own,
        "search": {
            "layouts": result.examined,
            "fitting": result.fitting,
            "simulated": sum(plan.time.exact for plan in plans),
        },
        "plans": [
            {"rank": rank, **_plan_json(request, plan, plans[0])}
            for rank, plan in enumerate(plans, start=1)
        ],
        "meshes": [_mesh_json(candidate) for candidate in result.meshes[:SHOWN_MESHES]],
    }


def _settings_json(layout: Layout) -> dict[str, Any]:
    """Return a layout's settings by the names of the command line."""
    settings = vars(layout) | {"zero_stage": layout.zero}
    for name in ("zero", "precision"):
        del settings[name]
    if layout.cp == 1:
        settings |= {"context_parallel": None, "cp_order": None}
    if layout.pp == 1:
        settings["schedule"] = None
    return settings


def _mesh_json(candidate: Candidate) -> dict[str, Any]:
    own = {"seconds": candidate.seconds, "memory_bytes": candidate.nbytes}
    return _settings_json(candidate.layout) | own


def _plan_json(request: Request, plan: Plan, winner: Plan) -> dict[str, Any]:
    seconds = asdict(plan.time)
    total = plan.time.total
    spread = request.spread
    exact = seconds.pop("exact")
    return {
        **_settings_json(plan.layout),
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "seconds": {**seconds, "total": total},
        "seconds_from_to": [(1 - spread) * total, (1 + spread) * total],
        "simulated": exact,
        "communication_bytes": {axis: float(nbytes) for axis, nbytes in vars(plan.volume).items()},
        "mfu": plan.mfu,
        "mfu_counted": counted_mfu(request, plan),
        "hfu": plan.hfu,
        "tflops_per_gpu": plan.tflops,
        "tokens_per_second": request.tokens / total,
        "why": "the fastest" if plan is winner else why(winner, plan),
    }


def counted_mfu(request: Request, plan: Plan) -> dict[str, float]:
    """Return a plan's utilization by each convention of `ModelShape.counted_flops`."""
    gpus = request.cluster.gpus
    peak = request.cluster.gpu.peak
    shares = {}
    for name, flops in request.model.counted_flops(request.length, plan.layout.recompute).items():
        operations = request.global_batch * flops
        shares[name] = utilization(operations, plan.time.total, gpus, peak)
    return shares


# ---- text ----------------------------------------------------------------------------------------


def as_text(request: Request, result: SearchResult) -> str:
    """Return tables of the plans, the assumptions above them, and below them why the slower plans
    are slower.
    """
    model = request.model
    cluster = request.cluster
    plans = result.plans
    memory = unit_of([plan.memory.total for plan in plans], BYTE_UNITS)
    time = unit_of([plan.time.total for plan in plans], TIME_UNITS)
    sent = unit_of([nbytes for plan in plans for nbytes in vars(plan.volume).values()], BYTE_UNITS)
    active = ""
    experts = ""
    if model.experts is not None:
        active = f", of which a token uses {model.active_parameters:,}"
        experts = f", {model.top_k} of {model.experts} experts"
    spread = request.spread
    mfu = {name: _percent(share) for name, share in counted_mfu(request, plans[0]).items()}
    lines = [
        f"{request.name}: {model.parameters:,} parameters{active}, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads{experts}",
        f"{cluster.gpus} x {request.gpu}, {cluster.per_host} to a host; batch {request.global_batch} x "
        f"{request.length} = {request.tokens:,} tokens per step",
        "",
        "Assumptions (minipar/plan/cluster.py):",
        *(f"  - {sentence}" for sentence in assumptions(request)),
        "",
        f"{result.examined:,} layouts, {result.fitting:,} fit, on {len(result.meshes)} meshes. The fastest layout of "
        f"each of the best {len(plans)} meshes (microbatch: the samples in one x how many each replica runs):",
        "",
        *_numbered(request, [_settings(plan.layout) for plan in plans]),
        "",
        f"Memory of the fullest rank, {memory}:",
        *_numbered(request, [_memory(plan, BYTE_UNITS[memory]) for plan in plans]),
        "",
        f"Time of a step, {time} (communication is what nothing hides), and what one rank sends in it (TFLOP/s and HFU "
        "count what is recomputed, MFU does not):",
        *_numbered(
            request, [_times(plan, spread, TIME_UNITS[time]) | _sent(plan, sent) for plan in plans]
        ),
        "",
        "MFU of 1. as others count it (N: the parameters that a token uses):",
        *table(list(mfu), [list(mfu.values())]),
        "",
        _ties(plans, spread),
    ]
    for rank, plan in enumerate(plans[1:], start=2):
        lines.append(f"{rank}. {why(plans[0], plan)}")
    if not all(plan.time.exact for plan in plans):
        lines.append("(~: too long to simulate; the schedule's closed form)")
    return "\n".join([*lines, "", *_command(request, plans[0])])


def _command(request: Request, plan: Plan) -> list[str]:
    """Return lines with the command line that trains the fastest plan here, to copy, or why there
    is none.
    """
    try:
        command = train_command(request.name, request.model, plan.layout, request.length)
    except UsageError as error:
        return [f"minipar.train cannot run 1.: {error}"]
    what = "The flags of 1. for minipar.train, which runs it on so many ranks of this machine:"
    return [what, *(f"  {line}" for line in command.splitlines())]


def unit_of(values: Sequence[float], units: Mapping[str, float]) -> str:
    """Return the largest of these units, largest first, that is not above the largest value; else
    the smallest.
    """
    largest = max(values)
    fitting = [name for name, size in units.items() if size <= largest]
    return fitting[0] if fitting else list(units)[-1]


def _settings(layout: Layout) -> Row:
    virtual = f" v={layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    replicas = f" x{layout.zero_replicas}" if layout.zero_replicas > 1 else ""
    return {
        "dp": f"{layout.dp}",
        "cp": f"{layout.cp} {layout.context_parallel}" if layout.cp > 1 else "1",
        "ep": f"{layout.ep}",
        "tp": f"{layout.tp}",
        "etp": f"{layout.expert_tp}",
        "pp": f"{layout.pp}",
        "ZeRO": f"{layout.zero}{replicas}",
        "microbatch": f"{layout.microbatch} x {layout.microbatches}",
        "schedule": f"{layout.schedule}{virtual}" if layout.pp > 1 else "-",
        "recompute": layout.recompute,
        "SP": "yes" if layout.sequence_parallel else "-",
    }


def _memory(plan: Plan, unit: float) -> Row:
    held = asdict(plan.memory) | {"total": plan.memory.total}
    return {name: f"{nbytes / unit:.1f}" for name, nbytes in held.items()}


def _times(plan: Plan, spread: float, unit: float) -> Row:
    time = plan.time
    total = plan.time.total / unit
    row = {part: f"{getattr(time, part) / unit:.3f}" for part in PARTS}
    row["update"] = row.pop("optimizer")
    return row | {
        "total": f"{'' if time.exact else '~'}{total:.4g} +-{spread * total:.2g}",
        "TFLOP/s/GPU": f"{plan.tflops:.0f}" if plan.tflops >= 10 else f"{plan.tflops:.2g}",
        "HFU": _percent(plan.hfu),
        "MFU": _percent(plan.mfu),
    }


def _sent(plan: Plan, name: str) -> Row:
    sent = {axis: float(getattr(plan.volume, axis)) for axis in ("tp", "cp", "ep", "pp", "dp")}
    return {f"{name} {axis}": f"{nbytes / BYTE_UNITS[name]:.1f}" for axis, nbytes in sent.items()}


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def _ties(plans: Sequence[Plan], spread: float) -> str:
    near = tied(plans, spread)
    if len(near) == 1:
        return f"Only 1. is within {spread:.0%} of the fastest; what is closer than that is tied."
    numbers = ", ".join(f"{1 + plans.index(plan)}." for plan in near)
    return f"Tied, within {spread:.0%} of the fastest, the simplest (no pipeline, fewer axes) first: {numbers}"


def _numbered(request: Request, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of the plans, without the columns of cp, ep and etp where the search
    has none.
    """
    tries = {"cp": request.tries_cp, "ep": request.tries_ep, "etp": request.tries_etp}
    # The last word of a name is the axis: also of "GB cp".
    shown = [name for name in rows[0] if tries.get(name.split()[-1], True)]
    numbered = [[f"{n}.", *(row[name] for name in shown)] for n, row in enumerate(rows, start=1)]
    return table(["", *shown], numbered)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned to the right below their names."""
    cells = [names, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


# ---- ties, and why the others are slower ---------------------------------------------------------


def tied(plans: Sequence[Plan], spread: float) -> list[Plan]:
    """Return the plans that take at most `spread` longer than the fastest, the simplest first.

    A comparison with measured runs cannot tell them apart.
    """
    fastest = min(plan.time.total for plan in plans)
    near = [plan for plan in plans if plan.time.total <= (1 + spread) * fastest]
    return sorted(near, key=lambda plan: (*complexity(plan.layout), plan.time.total))


def complexity(layout: Layout) -> tuple[bool, int]:
    """Return what makes a layout less simple: whether it has a pipeline, and how many axes are
    longer than 1.

    NB: memory does not count. Among the Playbook's runs the one with least memory is mostly slower
    than its ties.
    """
    return layout.pp > 1, sum(size > 1 for size in layout.axes)


def why(winner: Plan, loser: Plan) -> str:
    """Explain in a sentence what costs the loser its time."""
    name = unit_of([winner.time.total], TIME_UNITS)
    unit = TIME_UNITS[name]
    gap = loser.time.total - winner.time.total
    more = {part: getattr(loser.time, part) - getattr(winner.time, part) for part in PARTS}
    named = sorted(
        (part for part in PARTS if abs(more[part]) > NAMED_SHARE * gap),
        key=lambda part: -abs(more[part]),
    )
    worse = [
        f"{more[part] / unit:.3g} {name} more of {PARTS[part]}" for part in named if more[part] > 0
    ]
    better = [
        f"{-more[part] / unit:.3g} {name} less of {PARTS[part]}" for part in named if more[part] < 0
    ]
    against = f", against {', '.join(better)}" if better else ""
    return f"{gap / unit:.3g} {name} slower ({gap / winner.time.total:.1%}): {', '.join(worse)}{against}"
