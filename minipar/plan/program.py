"""What a training program does with a layout: whatever two programs do differently, and a planner has to know.

`MEGATRON` is what the published figures were measured with: Megatron-LM on NCCL (Narayanan et al. 2021, Korthikanti et
al. 2022), sharding as DeepSpeed does. `MINIPAR` is this repository's own program, so that what the planner says can be
held against a run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """What one layer keeps of one token for backward, in elements (a one-byte mask counts half a 16-bit element), and
    beside the layers what the loss keeps of one token.

    sliced    of hidden size; with sequence parallelism each tp rank has its slice of the tokens
    gathered  of hidden size, whole on every tp rank in any case
    rows      single numbers, sliced
    qkv, context, inner, gated   queries, keys, values; attention's output; of the MLP's inner size, plain or gated: all
                                 split over tp
    scores    for each head and each token attended to, split over tp
    logits    of vocabulary size, split over tp
    head      of hidden size, on the rank with the output head: its norm and its input
    boundary  of hidden size, in a pipeline: what came into a stage, and what it has made, each
    moving, moving_whole   of hidden size, once: gradients on their way through backward, sliced, and whole in any case
    """

    sliced: float
    gathered: float
    rows: float
    qkv: float
    context: float
    inner: float
    gated: float
    scores: float
    logits: float
    head: float
    boundary: float
    moving: float
    moving_whole: float


@dataclass(frozen=True)
class Program:
    """`ring_per_card`          collectives over several hosts are k rings at once, each with 1/k of the bytes through
                             another of a host's k cards; else one ring
    `blocking_hops`          a pipeline rank waits for every message: the other side's, and its own
    `scattered_hops`         of a microbatch's activations each tp rank sends its part in any case (Narayanan et al.
                             2021, section 4.1); else only under sequence parallelism
    `balanced_stages`        layers are cut so that the output head counts; else ceil(layers / stages) on the fullest
    `every_microbatch`       from ZeRO stage 2 on gradients are reduced after each microbatch; else once per step
    `pairwise`               parameters are gathered, and single numbers summed, by messages from each rank to each
    `gathers_ahead`          ZeRO stages 1 and 2 gather updated parameters behind the next step's first forward
    `embedding_returns`      the updated token embedding goes from the first stage to the last; else both update it
    """

    ring_per_card: bool
    blocking_hops: bool
    scattered_hops: bool
    balanced_stages: bool
    every_microbatch: bool
    pairwise: bool
    gathers_ahead: bool
    embedding_returns: bool
    kept: Kept


# Korthikanti et al. 2022, section 4.1: s b h (34 + 5 a s / h) bytes in 16 bits. Of a gated MLP: both products' outputs,
# the activated one, and the last product's input. Logits: in 16 bits, and the softmax in 32. NCCL builds a
# ring through each network card; Megatron's pipeline exchanges with both neighbours between two computations
# (p2p_communication.py); --overlap-param-gather.
MEGATRON = Program(
    ring_per_card=True,
    blocking_hops=True,
    scattered_hops=True,
    balanced_stages=False,
    every_microbatch=True,
    pairwise=False,
    gathers_ahead=True,
    embedding_returns=False,
    kept=Kept(
        sliced=5,
        gathered=0,
        rows=0,
        qkv=1,
        context=1,
        inner=2,
        gated=4,
        scores=2.5,
        logits=3,
        head=2,
        boundary=0,
        moving=0,
        moving_whole=0,
    ),
)

# tests/parallel/tensor/test_tensor_traffic.py counts what a layer keeps: 20 N + A + 2 B T elements.
MINIPAR = Program(
    ring_per_card=False,
    blocking_hops=False,
    scattered_hops=False,
    balanced_stages=True,
    every_microbatch=False,
    pairwise=True,
    gathers_ahead=False,
    embedding_returns=True,
    kept=Kept(
        sliced=2,
        gathered=2,
        rows=2,
        qkv=1,
        context=1,
        inner=3,
        gated=0,
        scores=1,
        logits=2,
        head=2,
        boundary=1,
        moving=2,
        moving_whole=1,
    ),
)
