"""What a search found: for the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minipar.plan.layout import PRECISIONS
from minipar.plan.machine import Cluster
from minipar.plan.model import ModelShape
from minipar.plan.planner import Found, Plan, Search, why

SHOWN_MESHES = 200  # in the JSON


@dataclass(frozen=True)
class Question:
    """What was asked: the names are as the user gave them."""

    name: str
    model: ModelShape
    gpu: str
    cluster: Cluster
    global_batch: int
    length: int
    search: Search

    @property
    def precision(self) -> str:
        return next(name for name, widths in PRECISIONS.items() if widths == self.search.precision)


def as_json(asked: Question, found: Found) -> dict[str, Any]:
    """Everything; bytes, seconds, FLOP/s."""
    model, cluster = asked.model, asked.cluster
    winner = found.plans[0]
    return {
        "model": {"name": asked.name, "parameters": model.parameters, **asdict(model)},
        "flops_per_sequence": {
            "model": model.model_flops(asked.length),
            "hardware_selective_recompute": model.hardware_flops(asked.length, "selective"),
            "hardware_full_recompute": model.hardware_flops(asked.length, "full"),
        },
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.per_host,
        "gpu": {"name": asked.gpu, **asdict(cluster.gpu)},
        "global_batch": asked.global_batch,
        "seq_len": asked.length,
        "tokens_per_step": asked.global_batch * asked.length,
        "assumptions": {**asdict(cluster.assumptions), "precision": asked.precision, "text": assumptions(asked)},
        "search": {"layouts": found.looked, "fitting": found.fitting, "simulated": _simulated(found)},
        "plans": [_plan(asked, rank, one, winner) for rank, one in enumerate(found.plans, start=1)],
        "meshes": [
            {"dp": one.dp, "tp": one.tp, "pp": one.pp, "zero_stage": one.zero, "recompute": one.recompute}
            | {"seconds": seconds, "memory_bytes": nbytes}
            for seconds, nbytes, one in found.meshes[:SHOWN_MESHES]
        ],
    }


def _simulated(found: Found) -> int:
    return sum(plan.time.exact for plan in found.plans)


def _plan(asked: Question, rank: int, plan: Plan, winner: Plan) -> dict[str, Any]:
    layout, tokens = plan.layout, asked.global_batch * asked.length
    seconds = asdict(plan.time)
    exact = seconds.pop("exact")
    return {
        "rank": rank,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "zero_stage": layout.zero,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "virtual_stages": layout.virtual_stages,
        "microbatch": layout.microbatch,
        "microbatches": layout.microbatches,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": layout.recompute,
        "attention": layout.attention,
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "seconds": {**seconds, "total": plan.time.total},
        "simulated": exact,
        "communication_bytes": {axis: float(nbytes) for axis, nbytes in vars(plan.volume).items()},
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "tflops_per_gpu": plan.tflops,
        "tokens_per_second": tokens / plan.time.total,
        "why": "the fastest" if plan is winner else why(winner, plan),
    }


def assumptions(asked: Question) -> list[str]:
    """In sentences."""
    a, gpu, widths = asked.cluster.assumptions, asked.cluster.gpu, asked.search.precision
    return [
        f"{asked.gpu}: {gpu.peak / 1e12:.0f} TFLOP/s dense 16-bit, {gpu.memory / 1e9:.0f} GB at "
        f"{gpu.memory_bandwidth / 1e9:.0f} GB/s; to each GPU {gpu.inside / 1e9:.0f} GB/s inside a host and "
        f"{gpu.between / 1e9:.4g} GB/s between hosts (one direction)",
        f"of these a program gets {a.products:.0%} in large products, {a.copies:.0%} in elementwise kernels, "
        f"{a.links:.0%} on links; a message starts in {a.alpha_inside * 1e6:.1f} us inside and "
        f"{a.alpha_between * 1e6:.0f} us between hosts; {a.memory_used:.0%} of memory can be used",
        f"{asked.precision}: {widths.parameters} + {widths.gradients} + {widths.optimizer} bytes per parameter "
        "(weights, gradients, AdamW), 16-bit activations; "
        + ("attention's scores are stored" if asked.search.attention == "stored" else "flash attention"),
        "tp: forward waits for its sums, backward's hide behind weight gradients (not in zb schedules); pp: every "
        "message is waited for",
        "dp: gradients hide behind backward, stage 3's gathers behind all computation, updated parameters of stages 1 "
        f"and 2 behind the next forward, and take {a.contention:.0%} of the hidden time from it; from stage 2 on "
        "gradients travel for every microbatch",
        "attention counts all pairs of tokens; data loading, checkpoints, stragglers, failures: not counted",
    ]


def as_text(asked: Question, found: Found) -> str:
    """The table, with what it stands on above it and why the others lost below."""
    model, cluster = asked.model, asked.cluster
    tokens = asked.global_batch * asked.length
    lines = [
        f"{asked.name}: {model.parameters:,} parameters, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads",
        f"{cluster.gpus} x {asked.gpu}, {cluster.per_host} to a host; batch {asked.global_batch} x {asked.length} = "
        f"{tokens:,} tokens per step",
        "",
        "Assumptions (minipar/plan/machine.py):",
        *(f"  - {one}" for one in assumptions(asked)),
        "",
        f"{found.looked:,} layouts, {found.fitting:,} fit, on {len(found.meshes)} meshes. The fastest layout of each "
        f"of the best {len(found.plans)} meshes:",
        "",
        *_table(["", "dp", "tp", "pp", "ZeRO", "microbatch", "schedule", "recompute", "SP"], _settings(found)),
        "",
        "Memory of the fullest rank, GB:",
        *_table(["", "parameters", "gradients", "optimizer", "activations", "buffers", "total"], _memory(found)),
        "",
        "Time of a step, seconds (communication is what nothing hides), and what one rank sends in it (TFLOP/s and HFU "
        "count what is recomputed, MFU does not):",
        *_table(
            ["", *"compute tp pp dp bubble update total TFLOP/s/GPU HFU MFU".split(), "GB tp", "GB pp", "GB dp"],
            _times(found),
        ),
        "",
    ]
    lines += [f"{rank}. {why(found.plans[0], plan)}" for rank, plan in enumerate(found.plans, start=1) if rank > 1]
    if _simulated(found) < len(found.plans):
        lines += ["(~: too long to simulate; the schedule's closed form)"]
    return "\n".join(lines).rstrip()


def _settings(found: Found) -> list[list[str]]:
    rows = []
    for rank, one in enumerate((plan.layout for plan in found.plans), start=1):
        schedule = "-" if one.pp == 1 else one.schedule + (f" v={one.virtual_stages}" if one.virtual_stages > 1 else "")
        sizes = [str(one.dp), str(one.tp), str(one.pp), str(one.zero)]
        count = f"{one.microbatch} x {one.microbatches}"
        rows.append([f"{rank}.", *sizes, count, schedule, one.recompute, "yes" if one.sequence_parallel else "-"])
    return rows


def _memory(found: Found) -> list[list[str]]:
    return [
        [f"{rank}.", *(f"{part / 1e9:.1f}" for part in asdict(plan.memory).values()), f"{plan.memory.total / 1e9:.1f}"]
        for rank, plan in enumerate(found.plans, start=1)
    ]


def _times(found: Found) -> list[list[str]]:
    rows = []
    for rank, plan in enumerate(found.plans, start=1):
        time, sent = plan.time, plan.volume
        parts = [time.compute, time.tp, time.pp, time.dp, time.bubble, time.optimizer]
        total = f"{'' if time.exact else '~'}{time.total:.4g}"
        gigabytes = [f"{float(nbytes) / 1e9:.1f}" for nbytes in (sent.tp, sent.pp, sent.dp)]
        row = [
            f"{rank}.",
            *(f"{part:.3f}" for part in parts),
            total,
            f"{plan.tflops:.0f}",
            f"{plan.hfu:.1%}",
            f"{plan.mfu:.1%}",
        ]
        rows.append(row + gigabytes)
    return rows


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [names, *rows]]
