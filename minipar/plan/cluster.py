"""A cluster: its GPUs, hosts and links, and the seconds that a collective takes on it.

Every constant is here, with its source or marked as an assumption.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from minipar.errors import UsageError
from minipar.plan.layout import MEGATRON, MINIPAR, Framework, Layout
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
    """An accelerator and its links, as the vendor's data sheet describes them: FLOP/s, bytes, bytes
    per second.

    Bandwidths are in one direction: `inside` to the other GPUs of its host, `between` to other
    hosts.
    """

    peak: float  # dense 16-bit matrix products, no sparsity
    memory: float
    memory_bandwidth: float
    inside: float
    between: float
    products: float = 0.75  # fraction of the peak that large products reach
    # Fraction of the peak that flash attention reaches, all pairs of tokens counted.
    attention: float = 0.61


# Vendors' data sheets: V100 SXM2 32 GB (125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways), A100 SXM
# 80 GB (312, 2039, 600), H100 SXM (989, 3350, 900), H200 SXM (989, 4800, 900). Between hosts one
# network card per GPU: 200 Gb/s on DGX A100 (as in Narayanan et al. 2021), 400 Gb/s on DGX H100 and
# H200; DGX-1V's four 100 Gb/s cards serve eight GPUs. Memory is the data sheet's. nvidia-smi shows
# 81,559 MiB of an H100: `{"like": "h100", "memory": 85.5e9}`.
#
# MPT's 1B model on one host fixes what an H100 reaches, and an A100 in flash attention: eight runs
# on each (tests/release/plan/fit_gpus.py). All other runs judge it. An A100's 0.75 is an
# assumption: what the vendor's own libraries reach. Of the V100 and the H200 there are no runs:
# they are taken for an A100 and an H100.
H100 = Gpu(
    peak=989e12,
    memory=80 * GB,
    memory_bandwidth=3350 * GB,
    inside=450 * GB,
    between=50 * GB,
    products=0.59,
    attention=0.36,
)
GPUS = {
    "v100": Gpu(
        peak=125e12, memory=32 * GB, memory_bandwidth=900 * GB, inside=150 * GB, between=6.25 * GB
    ),
    "a100": Gpu(
        peak=312e12, memory=80 * GB, memory_bandwidth=2039 * GB, inside=300 * GB, between=25 * GB
    ),
    "h100": H100,
    "h200": replace(H100, memory=141 * GB, memory_bandwidth=4800 * GB),
}


@dataclass(frozen=True)
class Assumptions:
    """Fractions of the data sheet's values that a program achieves, one set for all GPUs and
    models.

    The defaults are Megatron-LM's, and none of them is fitted to a run. PROGRAMS has the other
    programs'.
    """

    # Fraction of the peak in large 16-bit products and in flash attention. None: the GPU's own two.
    products: float | None = None
    # FLOPs of a product at which it reaches half of that: launch and tile quantization. An
    # assumption.
    half_work: float = 2e9
    # Fraction of memory bandwidth in kernels that only copy and add (STREAM-like). An assumption.
    copies: float = 0.8
    # Fraction of both links' bandwidth: nccl-tests on A100 hosts print 230 of 300 GB/s inside, 85
    # to 96 of 100 between three hosts (github.com/NVIDIA/nccl-tests, issues 149 and 119).
    links: float = 0.8
    # Times that elementwise kernels move each kept activation byte: forward writes and reads it;
    # backward reads it and the gradient and writes another. An assumption.
    forward_traffic: float = 2.0
    backward_traffic: float = 4.0
    # Bytes that the optimizer moves for each parameter: AdamW in mixed precision reads 16 and
    # writes 14.
    update_traffic: float = 30.0
    # Of `links`, what is left between hosts.
    cards: float = 1.0
    # An all-reduce takes as long as this many reduce-scatters: 2 as a ring, fewer as a tree.
    all_reduce: float = 2.0
    # Seconds that the host needs to launch a layer's kernels, forward and backward, and those of a
    # microbatch outside the layers. A GPU with less work waits for the host. In Megatron 2021
    # nothing shows it.
    host_layer: float = 0.0
    host_ends: float = 0.0
    # Seconds per message of a ring over NVLink and over the network: NCCL's own tuning table
    # (src/graph/tuning.cc, ring, protocol "Simple").
    alpha_inside: float = 3.4e-6
    alpha_between: float = 14e-6
    # Seconds of computation that each hidden second of communication costs: NCCL's kernels occupy a
    # multiprocessor for each channel, up to 24 of an A100's 108. The number of channels is an
    # assumption.
    contention: float = 0.2
    # Fraction of a GPU's memory that can be used: the rest is the context's, the libraries' and
    # fragmentation's. An assumption.
    memory_used: float = 0.92


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of computation on one rank, for one microbatch unless said otherwise.

    F (forward), I (gradients of inputs) and W (gradients of weights) of one layer, of the output
    head with the loss, and of the embedding. `recompute` is what recomputation adds to I of a
    layer; `update` is the optimizer's step.
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

    measured   measured(model, layout, length, parameters) returns the computation's seconds where
               they were measured; `parameters` are those that the rank updates. None: they follow
               from `gpu` and `assumptions`.
    """

    gpu: Gpu
    gpus: int
    per_host: int = 8
    assumptions: Assumptions = Assumptions()
    framework: Framework = MEGATRON
    measured: Callable[[ModelShape, Layout, int, float], ComputeTime] | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_host < 1:
            raise UsageError(
                f"gpus {self.gpus}, gpus-per-node {self.per_host}: expected at least 1 of each"
            )
        if self.gpus > self.per_host and self.gpus % self.per_host:
            raise UsageError(
                f"gpus {self.gpus} are not a multiple of gpus-per-node {self.per_host}"
            )

    @property
    def usable_memory(self) -> float:
        """Return the bytes of a GPU's memory that a program can use."""
        return self.gpu.memory * self.assumptions.memory_used

    @property
    def product_rate(self) -> float:
        """Return the FLOP/s of large products."""
        own = self.assumptions.products
        return self.gpu.peak * (self.gpu.products if own is None else own)

    @property
    def attention_rate(self) -> float:
        """Return the FLOP/s of flash attention, all pairs of tokens counted."""
        own = self.assumptions.products
        return self.gpu.peak * (self.gpu.attention if own is None else own)

    @property
    def inside(self) -> AlphaBeta:
        return AlphaBeta(
            alpha=self.assumptions.alpha_inside, beta=1 / (self.gpu.inside * self.assumptions.links)
        )

    @property
    def between(self) -> AlphaBeta:
        a = self.assumptions
        return AlphaBeta(alpha=a.alpha_between, beta=1 / (self.gpu.between * a.links * a.cards))

    # A group of ranks is given by (stride, size): the ranks 0, stride, 2 stride, ..., `size` of
    # them.

    def members_per_host(self, stride: int, size: int) -> int:
        """Return how many ranks of a group share a host."""
        return max(1, min(size, self.per_host // stride))

    def link(self, stride: int, size: int) -> AlphaBeta:
        """Return the cost of a message on the slowest link between neighbours of a group."""
        return self.inside if stride * size <= self.per_host else self.between


# ---- collectives ---------------------------------------------------------------------------------


def gather_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of `nbytes` over a group of N =
    size ranks.

    The ring takes N - 1 steps of n/N bytes, each as long as the slowest link: (N - 1) (alpha + n/N
    beta).

    Between hosts with k members each, a framework may run k rings at once, through k cards
    (Framework.ring_per_card). Then a k-th of the bytes passes each card and all of them pass the
    links inside; the longer of the two counts.
    """
    k = cluster.members_per_host(stride, size)
    hosts = -(-size // k)
    inside = cluster.inside
    between = cluster.between
    if hosts == 1 or not cluster.framework.ring_per_card:
        return (size - 1) * cluster.link(stride, size).seconds(nbytes / size)
    slow = size - 1 if cluster.framework.lockstep else hosts - 1
    latency = (size - 1 - slow) * inside.alpha + slow * between.alpha
    beta = max(inside.beta, between.beta / k) if k > 1 else between.beta
    return latency + nbytes * (size - 1) / size * beta


def fetch_seconds(cluster: Cluster, nbytes: float, stride: int, size: int) -> float:
    """Return the seconds of an all-gather of parameters over a group.

    It is a ring, or with Framework.pairwise each rank sends its n/N bytes to every other rank, one
    after the other.
    """
    if not cluster.framework.pairwise:
        return gather_seconds(cluster, nbytes, stride, size)
    return all_to_all_seconds(cluster, nbytes, stride, size)


def all_to_all_seconds(
    cluster: Cluster, nbytes: float, stride: int, size: int, in_steps: bool = False
) -> float:
    """Return the seconds of messages of n/N bytes from each rank of a group to each other one, one
    after the other.

    Each rank uses a network card of its own. With `in_steps` rank r sends to rank r + i in step i
    and waits for what comes from r - i, so that over hosts every step takes as long as a message
    between them.
    """
    if in_steps:
        return cluster.link(stride, size).seconds(nbytes / size) * (size - 1)
    near = cluster.members_per_host(stride, size) - 1
    chunk = nbytes / size
    return near * cluster.inside.seconds(chunk) + (size - 1 - near) * cluster.between.seconds(chunk)


def scalar_seconds(cluster: Cluster, stride: int, size: int) -> float:
    """Return the seconds of an all-reduce of one scalar, a loss or a norm: pairwise, or up and down
    a binary tree.
    """
    if cluster.framework.pairwise:
        return 2 * fetch_seconds(cluster, 0, stride, size)
    return 2 * (size - 1).bit_length() * cluster.link(stride, size).alpha


# ---- other clusters ------------------------------------------------------------------------------


def model_clock_cluster(
    ranks: int, flops_per_second: float, inside: AlphaBeta, between: AlphaBeta, per_host: int
) -> Cluster:
    """Return the cluster that minipar's clock `model` shows: products at one speed, messages alpha
    + beta n.

    Everything else takes no time.
    """
    gpu = Gpu(
        peak=flops_per_second,
        products=1.0,
        attention=1.0,
        memory=inf,
        memory_bandwidth=inf,
        inside=1 / inside.beta,
        between=1 / between.beta,
    )
    exact = Assumptions(
        half_work=0.0,
        links=1.0,
        alpha_inside=inside.alpha,
        alpha_between=between.alpha,
        contention=0.0,
    )
    return Cluster(gpu=gpu, gpus=ranks, per_host=per_host, assumptions=exact, framework=MINIPAR)
