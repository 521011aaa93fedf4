"""A cluster: its GPUs, hosts and links, and the seconds that a collective takes on it.

Every constant is here, with its source or marked as an assumption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from minipar.errors import UsageError
from minipar.hints import did_you_mean, suggest
from minipar.nn.pretrained import read_json
from minipar.plan.layout import (
    DEEPSPEED_2021,
    LLAMA_3,
    MEGATRON,
    MEGATRON_2021,
    MINIPAR,
    NANOTRON,
    Framework,
    Layout,
)  # fmt: skip
from minipar.plan.model import ModelShape

GB = 1e9


@dataclass(frozen=True)
class AlphaBeta:
    """The cost of a message on a link: n bytes take alpha + beta n seconds."""

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + nbytes * self.beta


@dataclass(frozen=True)
class Gpu:
    """An accelerator and its links, as the vendor's data sheet describes them: FLOP/s, bytes, bytes per second.

    Bandwidths are in one direction: `inside` to the other GPUs of its host, `between` to other hosts.
    """

    peak: float  # dense 16-bit matrix products, no sparsity
    memory: float
    memory_bandwidth: float
    inside: float
    between: float


# Vendors' data sheets: V100 SXM2 32 GB (125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways), A100 SXM 80 GB (312, 2039,
# 600), H100 SXM (989, 3350, 900), H200 SXM (989, 4800, 900). Between hosts one network card per GPU: 200 Gb/s on DGX
# A100 (as in Narayanan et al. 2021), 400 Gb/s on DGX H100 and H200; DGX-1V's four 100 Gb/s cards serve eight GPUs.
# Memory is the data sheet's. nvidia-smi shows 81,559 MiB of an H100: `{"like": "h100", "memory": 85.5e9}`.
GPUS = {
    "v100": Gpu(peak=125e12, memory=32 * GB, memory_bandwidth=900 * GB, inside=150 * GB, between=6.25 * GB),
    "a100": Gpu(peak=312e12, memory=80 * GB, memory_bandwidth=2039 * GB, inside=300 * GB, between=25 * GB),
    "h100": Gpu(peak=989e12, memory=80 * GB, memory_bandwidth=3350 * GB, inside=450 * GB, between=50 * GB),
    "h200": Gpu(peak=989e12, memory=141 * GB, memory_bandwidth=4800 * GB, inside=450 * GB, between=50 * GB),
}
GPU_RANGE = (1.0, 1e24)  # each value in a user's file lies in it
PROGRAM_RANGE = (0.0, 1e12)  # each value in a user's file that is not a fraction lies in it
PROGRAM_RANGES = dict.fromkeys(("products", "copies", "links", "cards", "memory_used"), (1e-6, 1.0))


@dataclass(frozen=True)
class Assumptions:
    """Fractions of the data sheet's values that a program achieves, one set for all GPUs and models.

    The defaults are Megatron-LM's, and none of them is fitted to a run. PROGRAMS has the other programs'.
    """

    # Fraction of the peak in large 16-bit products. An assumption: what the vendors' own libraries reach on an A100.
    products: float = 0.75
    # FLOPs of a product at which it reaches half of that: launch and tile quantization. An assumption.
    half_work: float = 2e9
    # Fraction of memory bandwidth in kernels that only copy and add (STREAM-like). An assumption.
    copies: float = 0.8
    # Fraction of both links' bandwidth: nccl-tests on A100 hosts print 230 of 300 GB/s inside, 85 to 96 of 100 between
    # three hosts (github.com/NVIDIA/nccl-tests, issues 149 and 119).
    links: float = 0.8
    # Times that elementwise kernels move each kept activation byte: forward writes and reads it; backward reads it and
    # the gradient and writes another. An assumption.
    forward_traffic: float = 2.0
    backward_traffic: float = 4.0
    # Bytes that the optimizer moves for each parameter: AdamW in mixed precision reads 16 and writes 14.
    update_traffic: float = 30.0
    # Of `links`, what is left between hosts.
    cards: float = 1.0
    # An all-reduce takes as long as this many reduce-scatters: 2 as a ring, fewer as a tree.
    all_reduce: float = 2.0
    # Seconds that the host needs to launch a layer's kernels, forward and backward, and those of a microbatch outside
    # the layers. A GPU with less work waits for the host. In Megatron 2021 nothing shows it.
    host_layer: float = 0.0
    host_ends: float = 0.0
    # Seconds per message of a ring over NVLink and over the network: NCCL's own tuning table (src/graph/tuning.cc,
    # ring, protocol "Simple").
    alpha_inside: float = 3.4e-6
    alpha_between: float = 14e-6
    # Seconds of computation that each hidden second of communication costs: NCCL's kernels occupy a multiprocessor for
    # each channel, up to 24 of an A100's 108. The number of channels is an assumption.
    contention: float = 0.2
    # Fraction of a GPU's memory that can be used: the rest is the context's, the libraries' and fragmentation's. An
    # assumption.
    memory_used: float = 0.92


@dataclass(frozen=True)
class Evidence:
    """The distance of predictions from measured seconds; `text` says in which runs it is within `spread`."""

    spread: float
    text: str


@dataclass(frozen=True)
class Program:
    """A program that trains: its framework's habits, and what it achieves of a data sheet's values."""

    framework: Framework
    assumptions: Assumptions
    evidence: Evidence


# The `half_work` with which two samples are the best microbatch in figure 16 of Narayanan et al. 2021, as printed; one
# sample is with 2e9. Table 1 of the same paper comes out within 3 % from 1e10 to 3e10.
LARGER_PRODUCTS = 2e10

# nanotron: the values that are not Megatron's were fitted to the Ultra-Scale Playbook's runs, with its 1B model and
# without a pipeline, on at most 32 hosts of 8 H100 (tests/plan/fit_nanotron.py), and to nothing else.
PROGRAMS = {
    "megatron": Program(  # tests/plan/test_published.py; the other three are LLaMA's, 17 to 30 % too fast
        MEGATRON, Assumptions(), Evidence(0.15, "seconds are within 15 % of the printed ones in 17 of 20 runs")
    ),
    "megatron-2021": Program(  # tests/plan/test_megatron_2021.py
        MEGATRON_2021,
        Assumptions(half_work=LARGER_PRODUCTS),
        Evidence(
            0.10, "seconds are within 4 % of the printed ones in 16 of 16 runs, 10 % in 34 of 39 read off figures"
        ),
    ),
    "deepspeed-2021": Program(
        DEEPSPEED_2021,
        Assumptions(half_work=LARGER_PRODUCTS),
        Evidence(0.10, "with ZeRO-3 seconds are within 10 % of the printed ones in 6 of 6 runs"),
    ),
    "llama-3": Program(
        LLAMA_3,
        Assumptions(half_work=LARGER_PRODUCTS),
        Evidence(0.15, "seconds are within 15 % of the printed ones in 2 of 2 runs, both of them longer"),
    ),
    "nanotron": Program(
        NANOTRON,
        Assumptions(
            products=0.53,
            half_work=7.8e9,
            forward_traffic=2.16,
            backward_traffic=4.32,
            links=0.70,
            cards=0.73,
            all_reduce=1.2,
            alpha_between=55e-6,
            host_layer=4.2e-3,
            host_ends=7.5e-3,
            memory_used=0.98,  # Framework.overhead is counted by itself
        ),
        Evidence(0.20, "without a pipeline seconds are within 20 % in 8 of 10 runs; with one nothing is known"),
    ),
    "minipar": Program(
        MINIPAR,
        Assumptions(),
        Evidence(0.20, "on two CPU cores, with constants measured on them, seconds are within 20 % in 28 of 28 runs"),
    ),
}


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of computation on one rank, for one microbatch unless said otherwise.

    F (forward), I (gradients of inputs) and W (gradients of weights) of one layer, of the output head with the loss,
    and of the embedding. `recompute` is what recomputation adds to I of a layer; `update` is the optimizer's step.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    head_forward: float
    head_backward_input: float
    head_backward_weight: float
    embedding_forward: float
    embedding_backward: float
    update: float


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs in hosts of `per_host`, and the framework that trains on them.

    Hosts are full unless one host holds all GPUs; UsageError otherwise.

    measured   measured(model, layout, length, parameters) returns the computation's seconds where they were measured;
               `parameters` are those that the rank updates. None: they follow from `gpu` and `assumptions`.
    """

    gpu: Gpu
    gpus: int
    per_host: int = 8
    assumptions: Assumptions = Assumptions()
    framework: Framework = MEGATRON
    measured: Callable[[ModelShape, Layout, int, float], ComputeTime] | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_host < 1:
            raise UsageError(f"gpus {self.gpus}, gpus-per-node {self.per_host}: expected at least 1 of each")
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise UsageError(f"gpus {self.gpus} are not a multiple of gpus-per-node {self.per_host}")

    @property
    def usable_memory(self) -> float:
        """Return the bytes of a GPU's memory that a program can use."""
        return self.gpu.memory * self.assumptions.memory_used

    @property
    def inside(self) -> AlphaBeta:
        return AlphaBeta(alpha=self.assumptions.alpha_inside, beta=1 / (self.gpu.inside * self.assumptions.links))

    @property
    def between(self) -> AlphaBeta:
        a = self.assumptions
        return AlphaBeta(alpha=a.alpha_between, beta=1 / (self.gpu.between * a.links * a.cards))

    # A group of ranks is given by (stride, size): the ranks 0, stride, 2 stride, ..., `size` of them.

    def members_per_host(self, stride: int, size: int) -> int:
        """Return how many ranks of a group share a host."""
        return max(1, min(size, self.per_host // stride))

    def link(self, stride: int, size: int) -> AlphaBeta:
        """Return the cost of a message on the slowest link between neighbours of a group."""
        return self.inside if stride * size <= self.per_host else self.between


# ---- collectives -----------------------------------------------------------------------------------------------------


def gather_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of `nbytes` over a group of N = size ranks.

    The ring takes N - 1 steps of n/N bytes, each as long as the slowest link: (N - 1) (alpha + n/N beta).

    Between hosts with k members each, a framework may run k rings at once, through k cards (Framework.ring_per_card).
    Then a k-th of the bytes passes each card and all of them pass the links inside; the longer of the two counts.
    """
    if size == 1:
        return 0.0
    k = cluster.members_per_host(stride, size)
    hosts = -(-size // k)
    inside, between = cluster.inside, cluster.between
    if hosts == 1 or not cluster.framework.ring_per_card:
        return (size - 1) * cluster.link(stride, size).seconds(nbytes / size)
    slow = size - 1 if cluster.framework.lockstep else hosts - 1
    latency = (size - 1 - slow) * inside.alpha + slow * between.alpha
    beta = max(inside.beta, between.beta / k) if k > 1 else between.beta
    return latency + nbytes * (size - 1) / size * beta


def fetch_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """Return the seconds of an all-gather of parameters over a group.

    It is a ring, or with Framework.pairwise each rank sends its n/N bytes to every other rank, one after the other.
    """
    if not cluster.framework.pairwise:
        return gather_seconds(cluster, nbytes, stride, size)
    return all_to_all_seconds(cluster, nbytes, stride, size)


def all_to_all_seconds(cluster: Cluster, nbytes: float, stride: int, size: int, in_steps: bool = False) -> float:
    """Return the seconds of messages of n/N bytes from each rank of a group to each other one, one after the other.

    Each rank uses a network card of its own. With `in_steps` rank r sends to rank r + i in step i and waits for what
    comes from r - i, so that over hosts every step takes as long as a message between them.
    """
    if in_steps:
        return cluster.link(stride, size).seconds(nbytes / size) * (size - 1)
    near = cluster.members_per_host(stride, size) - 1
    chunk = nbytes / size
    return near * cluster.inside.seconds(chunk) + (size - 1 - near) * cluster.between.seconds(chunk)


def scalar_seconds(cluster: Cluster, stride: int, size: int) -> float:
    """Return the seconds of an all-reduce of one scalar, a loss or a norm: pairwise, or up and down a binary tree."""
    if cluster.framework.pairwise:
        return 2 * fetch_seconds(cluster, 0, stride, size)
    return 2 * (size - 1).bit_length() * cluster.link(stride, size).alpha


# ---- other clusters --------------------------------------------------------------------------------------------------


def model_clock_cluster(
    ranks: int, flops_per_second: float, inside: AlphaBeta, between: AlphaBeta, per_host: int
) -> Cluster:
    """Return the cluster that minipar's clock `model` shows: products at one speed, messages alpha + beta n.

    Everything else takes no time.
    """
    gpu = Gpu(peak=flops_per_second, memory=inf, memory_bandwidth=inf, inside=1 / inside.beta, between=1 / between.beta)
    exact = Assumptions(
        products=1.0,
        half_work=0.0,
        copies=1.0,
        links=1.0,
        alpha_inside=inside.alpha,
        alpha_between=between.alpha,
        contention=0.0,
        memory_used=1.0,
    )
    return Cluster(gpu=gpu, gpus=ranks, per_host=per_host, assumptions=exact, framework=MINIPAR)


def find_program(name: str) -> Program:
    """Return a program by its name, or from a JSON file with values of the user's own.

    The file holds fields of Assumptions, Framework and Activations, and "like", the name of the program that gives the
    rest (Megatron's without it). UsageError for an unknown name and for a file that describes no program.
    """
    if name.lower() in PROGRAMS:
        return PROGRAMS[name.lower()]
    values = _own_values(name, "--program", PROGRAMS)
    base = (values.pop("like", None) or "megatron").lower()
    like = PROGRAMS[base]
    parts: list[dict[str, Any]] = [vars(like.assumptions), vars(like.framework), vars(like.framework.kept)]
    known = {key: value for part in parts for key, value in part.items() if key != "kept"}
    for key, value in values.items():
        if key not in known:
            question = did_you_mean(suggest(key, known)) or "; see cluster.py"
            raise UsageError(f"{name}: no program has {key[:40]!r}{question}")
        if isinstance(known[key], bool) and not isinstance(value, bool):
            raise UsageError(f"{name}: {key} is {str(value)[:40]}, expected true or false")
        if not isinstance(known[key], bool):
            low, high = PROGRAM_RANGES.get(key, PROGRAM_RANGE)
            values[key] = _number(name, key, value, low, high)
    assumptions, framework, kept = ({key: values[key] for key in values if key in part} for part in parts)
    evidence = like.evidence
    if values:
        evidence = replace(evidence, text=f"no run was compared with these values; of {base}: {evidence.text}")
    return Program(
        framework=replace(like.framework, **framework, kept=replace(like.framework.kept, **kept)),
        assumptions=replace(like.assumptions, **assumptions),
        evidence=evidence,
    )


def _own_values(name: str, flag: str, known: Mapping[str, object]) -> dict[str, Any]:
    """Return the values in a user's JSON file, of which "like" is a known name if it is there."""
    if not os.path.exists(name):  # False, too, for a name that is too long
        question = did_you_mean(suggest(name, known))
        raise UsageError(f"{flag} {name}: neither a JSON file nor one of {', '.join(known)}{question}")
    values: dict[str, Any] = read_json(Path(name))
    like = values.get("like")
    if like is not None and (not isinstance(like, str) or like.lower() not in known):
        raise UsageError(f'{name}: "like" is {str(like)[:40]!r}, expected one of {", ".join(known)}')
    return values


def _number(name: str, key: str, value: object, low: float, high: float) -> float:
    """Return a value of a user's file as a float. UsageError unless it is a number from `low` to `high`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name}: {key} is {str(value)[:40]}, expected a value from {low:g} to {high:g}")
    return float(value)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, or from a JSON file with values of the user's own.

    The file holds Gpu's fields, or some of them and "like", the name of a GPU that gives the rest. UsageError for an
    unknown name and for a file that describes no GPU.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    values = _own_values(name, "--gpu", GPUS)
    like = values.pop("like", None)
    fields = asdict(GPUS["a100"])
    if values.keys() - fields or (like is None and fields.keys() - values):
        raise UsageError(f'{name}: expected {", ".join(sorted(fields))}, or some of them and "like": a known GPU')
    numbers = {key: _number(name, key, value, *GPU_RANGE) for key, value in values.items()}
    return Gpu(**numbers) if like is None else replace(GPUS[like.lower()], **numbers)
