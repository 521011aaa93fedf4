"""The cost of minipar's computation in few constants: CPU seconds of each piece of a training step, for any shape.

A piece is a block's pass, the embedding, the head with its loss, the gradient's norm or the update. It takes the sum,
over its constants (`PIECES`), of constant times amount. The constants are fitted to measured pieces (machine.py). They
are the same for all shapes, so the planner can use them for other shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minipar.comm.clock import Network
from minipar.plan.cluster import ComputeTime
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import layer_activations

BLOCKS = 4  # measured one after another, so that weights are as far from the processor as in training
BLOCK_TENSORS, OTHER_TENSORS = 12, 4  # parameter tensors of a block; two embeddings and the last norm's two


@dataclass(frozen=True)
class Shape:
    """One microbatch on one of `tp` ranks: `samples` of `seq_len` tokens. Only the ends depend on `vocab_size`."""

    hidden: int
    heads: int
    seq_len: int
    samples: int
    tp: int = 1
    sequence_parallel: bool = False
    vocab_size: int = 256


# ---- constants -------------------------------------------------------------------------------------------------------


def amounts_of(shape: Shape, parameters: float) -> dict[str, float]:
    """Return the amounts of a shape on one rank, by which the constants are multiplied.

    forward, input, weight   FLOPs of a block's F, I and W: its matrices, and attention's core once, twice, never
    head, head_backward      FLOPs of the output head
    kept          bytes that a block keeps for backward as the papers count them (16 bits and masks); all elementwise
                  work is proportional to them
    matrices      parameters of a block's matrices, which are read from memory
    copied        elements (B, T, h) that are copied before tensor parallelism sums them; 0 without it
    logits        elements of the logits;  hidden: of (B, T, h);  head_hidden: of the head's input
    parameters, tensors   that the optimizer updates
    once          1: the overhead of a pass
    """
    model = ModelShape(1, shape.hidden, shape.heads, shape.vocab_size, positions=shape.seq_len)
    layout = Layout(
        dp=1, tp=shape.tp, pp=1, microbatch=shape.samples, microbatches=1, sequence_parallel=shape.sequence_parallel
    )
    core, head = model.attention_core_flops(shape.seq_len), model.head_flops(shape.seq_len)
    matrices = model.layer_flops(shape.seq_len) - core
    tokens = shape.samples * shape.seq_len
    hidden = tokens * shape.hidden
    return {
        "forward": (matrices + core) * shape.samples / shape.tp,
        "input": (matrices + 2 * core) * shape.samples / shape.tp,
        "weight": matrices * shape.samples / shape.tp,
        "head": head * shape.samples / shape.tp,
        "head_backward": 2 * head * shape.samples / shape.tp,
        "kept": layer_activations(model, layout, shape.seq_len),
        "matrices": 12 * shape.hidden**2 / shape.tp,
        "copied": hidden if shape.tp > 1 else 0,
        "logits": tokens * shape.vocab_size / shape.tp,
        "hidden": hidden,
        "head_hidden": hidden / layout.sequence_slices,
        "parameters": parameters,
        "tensors": BLOCK_TENSORS * BLOCKS + OTHER_TENSORS,
        "once": 1.0,
    }


# The constants of each piece, and the amount that each multiplies. A name ends in what the seconds are for: a FLOP of
# products (float32, one thread), a byte that a block keeps, an element of the logits or of (B, T, h), a parameter, a
# parameter tensor, a pass over a block or another piece. A step's first microbatch writes weight gradients (W), the
# others add (W more).
PIECES: dict[str, dict[str, str]] = {
    "F": {
        "seconds_per_flop": "forward",
        "forward_byte": "kept",
        "forward_block": "once",
        "read_parameter": "matrices",
        "copy_hidden": "copied",
    },
    "I": {
        "seconds_per_flop": "input",
        "input_byte": "kept",
        "input_block": "once",
        "read_parameter": "matrices",
        "copy_hidden": "copied",
    },
    "W": {"seconds_per_flop": "weight", "weight_byte": "kept", "weight_block": "once"},
    "W more": {
        "seconds_per_flop": "weight",
        "weight_byte": "kept",
        "weight_block": "once",
        "accumulate_parameter": "matrices",
    },
    "head F": {
        "seconds_per_flop": "head",
        "head_forward_logit": "logits",
        "head_forward_hidden": "head_hidden",
        "head_forward_call": "once",
    },
    "head B": {
        "seconds_per_flop": "head_backward",
        "head_backward_logit": "logits",
        "head_backward_hidden": "head_hidden",
        "head_backward_call": "once",
    },
    "embed F": {"embed_forward_hidden": "hidden", "embed_forward_call": "once"},
    "embed B": {"embed_backward_hidden": "hidden", "embed_backward_call": "once"},
    "norm": {"norm_parameter": "parameters", "norm_tensor": "tensors"},
    "AdamW": {"update_parameter": "parameters", "update_tensor": "tensors"},
}
BLOCK = ("F", "I", "W", "W more")  # the pieces of a block


@dataclass(frozen=True)
class Machine:
    """The constants that `bench machine` measures: `costs` of computation, `network`: a message between two ranks."""

    costs: Mapping[str, float]
    network: Network


def predicted(costs: Mapping[str, float], piece: str, shape: Shape, parameters: float) -> float:
    """Return the seconds of a piece; `parameters` of the rank, for the norm and the update."""
    amounts = amounts_of(shape, parameters)
    return sum(costs[constant] * amounts[amount] for constant, amount in PIECES[piece].items())


def compute_time(
    costs: Mapping[str, float], model: ModelShape, layout: Layout, length: int, parameters: float
) -> ComputeTime:
    """Return the computation of a layout for the planner (Cluster.measured).

    The cost of adding to gradients, from a step's second microbatch on, is spread over all microbatches. The output
    head's W is its products.
    """
    sequence, vocabulary = layout.sequence_parallel, model.vocab_size
    shape = Shape(model.hidden, model.heads, length, layout.microbatch, layout.tp, sequence, vocabulary)
    seconds = {piece: predicted(costs, piece, shape, parameters) for piece in PIECES}
    m, tensors = layout.microbatches, BLOCK_TENSORS * layout.layers_per_rank(model) + OTHER_TENSORS
    head_weight = costs["seconds_per_flop"] * amounts_of(shape, parameters)["head"]
    per_parameter = costs["norm_parameter"] + costs["update_parameter"]
    per_tensor = costs["norm_tensor"] + costs["update_tensor"]
    return ComputeTime(
        forward=seconds["F"],
        backward_input=seconds["I"],
        backward_weight=(seconds["W"] + (m - 1) * seconds["W more"]) / m,
        recompute=seconds["F"] if layout.recompute == "full" else 0.0,
        head_forward=seconds["head F"],
        head_backward_input=seconds["head B"] - head_weight,
        head_backward_weight=head_weight,
        embedding_forward=seconds["embed F"],
        embedding_backward=seconds["embed B"],
        update=per_parameter * parameters + per_tensor * tensors,
    )


# ---- the fit ---------------------------------------------------------------------------------------------------------


def fit_costs(measured: Sequence[tuple[Shape, Mapping[str, float]]]) -> dict[str, float]:
    """Return the constants that are nearest to these measurements of `pieces`, by squared relative errors."""
    constants = dict.fromkeys(constant for piece in PIECES.values() for constant in piece)
    features, seconds = [], []
    for shape, times in measured:
        amounts = amounts_of(shape, times["parameters"])
        for piece, counted in PIECES.items():
            features.append([amounts[counted[name]] if name in counted else 0.0 for name in constants])
            seconds.append(times[piece])
    return dict(zip(constants, fit(features, seconds), strict=True))


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return c >= 0 with a small sum over i of (features[i] @ c / seconds[i] - 1)^2; features (n, k), n >= k.

    A small measurement counts as much as a large one. Least squares are solved without bounds, then again without the
    most negative constant, which becomes 0, until no constant is negative.
    """
    relative = np.asarray(features, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = relative.max(axis=0)  # seconds per byte next to seconds per call: 1e-9 next to 1e-5
    chosen = list(range(len(scale)))
    while True:
        found = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(relative)))[0]
        if (found >= 0).all():
            break
        del chosen[int(found.argmin())]
    constants = np.zeros(len(scale))
    constants[chosen] = found / scale[chosen]
    return constants.tolist()
