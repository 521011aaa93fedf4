"""What a cluster is, to a planner: GPUs, hosts, links. Every constant stands here, with its source or as an
assumption.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from minipar.errors import UsageError
from minipar.plan.program import MEGATRON, MINIPAR, Program

if TYPE_CHECKING:
    from minipar.plan.compute import Compute
    from minipar.plan.layout import Layout
    from minipar.plan.model import ModelShape

GB = 1e9


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes alpha + beta n seconds."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Gpu:
    """One accelerator and what it is connected with. FLOP/s, bytes, bytes per second in one direction.

    `inside` is its bandwidth to the others of its host, `between` to other hosts, as the makers print them.
    """

    peak: float  # dense 16-bit matrix products, no sparsity
    memory: float
    memory_bandwidth: float
    inside: float
    between: float


# Vendors' data sheets: V100 SXM2 32 GB (125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways), A100 SXM 80 GB (312, 2039,
# 600), H100 SXM (989, 3350, 900), H200 SXM (989, 4800, 900). Between hosts one network card per GPU: 200 Gb/s on DGX
# A100 (as in Narayanan et al. 2021), 400 Gb/s on DGX H100 and H200; DGX-1V's four 100 Gb/s cards serve eight GPUs.
GPUS = {
    "v100": Gpu(125e12, 32 * GB, 900 * GB, 150 * GB, 6.25 * GB),
    "a100": Gpu(312e12, 80 * GB, 2039 * GB, 300 * GB, 25 * GB),
    "h100": Gpu(989e12, 80 * GB, 3350 * GB, 450 * GB, 50 * GB),
    "h200": Gpu(989e12, 141 * GB, 4800 * GB, 450 * GB, 50 * GB),
}


@dataclass(frozen=True)
class Assumptions:
    """How much of the printed numbers a program gets. One set for all GPUs and models; no value is fitted to one
    run.
    """

    # Of the peak, in large 16-bit products. An assumption: what the makers' own libraries reach on an A100.
    products: float = 0.75
    # FLOPs of a product at which it reaches half of that: launch and tile quantization. An assumption.
    half_work: float = 2e9
    # Of memory bandwidth, in kernels that only copy and add (STREAM-like). An assumption.
    copies: float = 0.8
    # Of both links' bandwidth: nccl-tests on A100 hosts print 230 of 300 GB/s inside, 85 to 96 of 100 between three
    # hosts (github.com/NVIDIA/nccl-tests, issues 149 and 119).
    links: float = 0.8
    # Elementwise kernels move each kept activation byte this often: forward writes and reads it; backward reads it and
    # the gradient and writes another. An assumption.
    forward_traffic: float = 2.0
    backward_traffic: float = 4.0
    # Bytes that the optimizer moves for each parameter: AdamW in mixed precision reads 16 and writes 14.
    update_traffic: float = 30.0
    # Seconds per message of a ring over NVLink and over the network: NCCL's own tuning table (src/graph/tuning.cc,
    # ring, protocol "Simple").
    alpha_inside: float = 3.4e-6
    alpha_between: float = 14e-6
    # What each hidden second of communication takes from the computation beside it: NCCL's kernels occupy a
    # multiprocessor for each channel, up to 24 of an A100's 108. An assumption as to how many.
    contention: float = 0.2
    # Of a GPU's memory: the rest is the context's, the libraries' and fragmentation's. An assumption.
    memory_used: float = 0.92


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs, `per_host` to a host (the last dividing the first, or all in one). UsageError otherwise.

    `program`: what trains on it. `measured(model, layout, length, parameters)`: what computation takes where that was
    measured, `parameters` being those that a rank updates; without it compute.gpu_compute says so.
    """

    gpu: Gpu
    gpus: int
    per_host: int = 8
    assumptions: Assumptions = Assumptions()
    program: Program = MEGATRON
    measured: Callable[[ModelShape, Layout, int, float], Compute] | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_host < 1:
            raise UsageError(f"gpus {self.gpus}, gpus-per-node {self.per_host}: expected at least 1 of each")
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise UsageError(f"gpus {self.gpus} are not a multiple of gpus-per-node {self.per_host}")

    @property
    def inside(self) -> Link:
        return Link(self.assumptions.alpha_inside, 1 / (self.gpu.inside * self.assumptions.links))

    @property
    def between(self) -> Link:
        return Link(self.assumptions.alpha_between, 1 / (self.gpu.between * self.assumptions.links))

    def members_per_host(self, stride: int, size: int) -> int:
        """How many of the ranks 0, stride, 2 stride, ... (size of them) are on one host."""
        return max(1, min(size, self.per_host // stride))

    def link(self, stride: int, size: int) -> Link:
        """The slowest between neighbours of the ranks 0, stride, 2 stride, ... (size of them)."""
        return self.inside if stride * size <= self.per_host else self.between


def model_clock_cluster(
    ranks: int, flops_per_second: float, inside: Link, between: Link | None = None, per_host: int | None = None
) -> Cluster:
    """What the clock `model` shows of minipar: products at one speed, messages alpha + beta n, all else takes no time.

    `per_host` ranks to a host, `between` hosts another link; by default one host has all of them.
    """
    between = between or inside
    gpu = Gpu(flops_per_second, inf, inf, 1 / inside.beta, 1 / between.beta)
    exactly = Assumptions(
        products=1.0,
        half_work=0.0,
        copies=1.0,
        links=1.0,
        alpha_inside=inside.alpha,
        alpha_between=between.alpha,
        contention=0.0,
        memory_used=1.0,
    )
    return Cluster(gpu, ranks, per_host or ranks, exactly, MINIPAR)


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, or a JSON file with numbers of your own: any of Gpu's fields, and "like" for the rest."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    path = Path(name)
    if not path.exists():
        raise UsageError(f"--gpu {name}: neither a JSON file nor one of {', '.join(GPUS)}")
    known = {field.name for field in fields(Gpu)}
    try:
        found = json.loads(path.read_text())
        like = found.pop("like", None)
        if set(found) - known or (like is None and known - set(found)):
            raise UsageError(f'{path}: expected {", ".join(sorted(known))}, or some of them and "like": a known GPU')
        numbers = {key: float(value) for key, value in found.items()}
        if any(not value > 0 for value in numbers.values()):
            raise UsageError(f"{path}: every number must be above 0")
        return replace(GPUS[like], **numbers) if like is not None else Gpu(**numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not describe a GPU: {type(error).__name__} {error}") from None
