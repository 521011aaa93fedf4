"""Predict runs of MPT with FSDP.

RECORD has 202 runs that Mosaic measured (llm-foundry 8c8dd48f7, scripts/train/benchmarking/README.md): hosts of 8 A100
or 8 H100, 1,600 or 3,200 Gb/s between them, ZeRO stage 3 (FULL_SHARD) or 2 (SHARD_GRAD_OP), flash attention, every
layer recomputed or none. PURE keeps and sums gradients in 16 bits, DEFAULT in 32. Seven runs computed in fp8.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from minipar.plan.cluster import GPUS, Cluster, Gpu
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape
from minipar.plan.programs import PROGRAMS
from minipar.plan.step_time import step_time

RECORD = Path(__file__).parent / "recorded" / "mpt.csv"
SIZES = {  # layers, hidden, heads
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
A100_40GB = replace(GPUS["a100"], memory=40e9, memory_bandwidth=1555e9)
CARDS = {"a100_40gb": A100_40GB, "a100_80gb": GPUS["a100"], "h100_80gb": GPUS["h100"]}
PEAKS = {"a100_40gb": 312e12, "a100_80gb": 312e12, "h100_80gb": 989.5e12}  # that the record's MFU refers to


@dataclass(frozen=True)
class MptRun:
    """A measured run; `mfu` and `hfu` are per cent as printed."""

    name: str
    gpu: str
    gpus: int
    length: int
    layout: Layout
    fp8: bool
    tokens_per_second: float
    mfu: float
    hfu: float

    @property
    def model(self) -> ModelShape:
        return ModelShape(*SIZES[self.name], vocab_size=50368, positions=self.length)

    @property
    def card(self) -> Gpu:
        return CARDS[self.gpu]

    @property
    def peak(self) -> float:
        return PEAKS[self.gpu] * (2 if self.fp8 else 1)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        one = self.layout
        return one.dp * one.microbatch * one.microbatches * self.length / self.tokens_per_second


@cache
def mpt_runs() -> tuple[MptRun, ...]:
    """Read the record."""
    with RECORD.open() as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: dict[str, str]) -> MptRun:
    layout = Layout(
        dp=int(row["gpus"]),
        tp=1,
        pp=1,
        microbatch=int(row["microbatch"]),
        microbatches=int(row["microbatches"]),
        zero=3 if row["sharding"] == "FULL_SHARD" else 2,
        recompute="full" if row["recompute"] == "True" else "none",
        attention="flash",
        precision=PRECISIONS["fp16" if row["mode"] == "PURE" else "bf16"],
    )
    return MptRun(
        name=row["model"],
        gpu=row["gpu"],
        gpus=int(row["gpus"]),
        length=int(row["length"]),
        layout=layout,
        fp8=row["precision"] == "amp_fp8",
        tokens_per_second=float(row["tokens_per_second"]),
        mfu=float(row["mfu"]),
        hfu=float(row["hfu"]),
    )


def seconds(run: MptRun, card: Gpu | None = None, program: str = "megatron") -> float:
    """Predict the seconds of a run's step with a program's constants, on another card if one is given."""
    own, gpu = PROGRAMS[program], run.card if card is None else card
    cluster = Cluster(gpu, run.gpus, framework=own.framework, assumptions=own.assumptions)
    return step_time(run.model, run.layout, cluster, run.length).total
