"""The cost of minipar's computation in few constants: CPU seconds of each piece of a training step, for any shape.

A piece is a block's pass, the embedding, the head with its loss, the gradient's norm or the update. It takes
FLOPs / flops_per_second, and for each of its constants (`Costs`) that constant times an amount. The constants are
fitted to measured pieces (machine.py). They are the same for all shapes, so the planner can use them for other shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from minipar.comm.clock import Network
from minipar.errors import UsageError
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


# Each piece and its FLOPs (amounts_of). A step's first microbatch writes weight gradients (W), the others add (W more).
PIECES = {
    "F": "forward", "I": "input", "W": "weight", "W more": "weight", "head F": "head", "head B": "head_backward",
    "embed F": None, "embed B": None, "norm": None, "AdamW": None,
}  # fmt: skip
SUMS = {"B": ("I", "W"), "B more": ("I", "W more")}  # measured as well, and predicted as sums
BLOCK = ("F", "I", "W", "W more")  # fitted together, since they share the rate of products


def flops(piece: str, amounts: Mapping[str, float]) -> float:
    """Return the FLOPs of a piece's matrix products on one rank."""
    name = PIECES[piece]
    return 0.0 if name is None else amounts[name]


def cost(amount: str, *pieces: str) -> Any:
    """Declare a constant: the amount that it multiplies, and the pieces that it is a part of."""
    return field(metadata={"amount": amount, "pieces": pieces})


@dataclass(frozen=True)
class Costs:
    """The fitted constants: flops_per_second (float32, one thread), and seconds per the unit that a name ends in.

    *_byte       byte that a block keeps;  *_block: block and pass
    *_logit      element of the logits;  *_hidden: element of (B, T, h);  *_call: pass
    *_parameter  parameter;  *_tensor: parameter tensor
    """

    flops_per_second: float
    forward_byte: float = cost("kept", "F")
    input_byte: float = cost("kept", "I")
    weight_byte: float = cost("kept", "W", "W more")
    forward_block: float = cost("once", "F")
    input_block: float = cost("once", "I")
    weight_block: float = cost("once", "W", "W more")
    read_parameter: float = cost("matrices", "F", "I")
    copy_hidden: float = cost("copied", "F", "I")
    accumulate_parameter: float = cost("matrices", "W more")
    head_forward_logit: float = cost("logits", "head F")
    head_forward_hidden: float = cost("head_hidden", "head F")
    head_forward_call: float = cost("once", "head F")
    head_backward_logit: float = cost("logits", "head B")
    head_backward_hidden: float = cost("head_hidden", "head B")
    head_backward_call: float = cost("once", "head B")
    embed_forward_hidden: float = cost("hidden", "embed F")
    embed_forward_call: float = cost("once", "embed F")
    embed_backward_hidden: float = cost("hidden", "embed B")
    embed_backward_call: float = cost("once", "embed B")
    norm_parameter: float = cost("parameters", "norm")
    norm_tensor: float = cost("tensors", "norm")
    update_parameter: float = cost("parameters", "AdamW")
    update_tensor: float = cost("tensors", "AdamW")

    def seconds(self, piece: str, shape: Shape, parameters: float) -> float:
        """Predict a piece of PIECES or SUMS; `parameters` of the rank, for the norm and the update."""
        amounts = amounts_of(shape, parameters)
        terms = []
        for name in SUMS.get(piece, (piece,)):
            terms.append(flops(name, amounts) / self.flops_per_second)
            terms += [getattr(self, constant) * amount for constant, amount in counts_of(name, amounts).items()]
        return sum(terms)

    def compute(self, model: ModelShape, layout: Layout, length: int, parameters: float) -> ComputeTime:
        """Return the computation of a layout for the planner (Cluster.measured).

        The cost of adding to gradients, from a step's second microbatch on, is spread over all microbatches. The output
        head's W is its products.
        """
        sequence, vocabulary = layout.sequence_parallel, model.vocab_size
        shape = Shape(model.hidden, model.heads, length, layout.microbatch, layout.tp, sequence, vocabulary)
        seconds = {piece: self.seconds(piece, shape, parameters) for piece in PIECES}
        m, tensors = layout.microbatches, BLOCK_TENSORS * layout.layers_per_rank(model) + OTHER_TENSORS
        head_weight = flops("head B", amounts_of(shape, parameters)) / 2 / self.flops_per_second
        per_parameter = self.norm_parameter + self.update_parameter
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
            update=per_parameter * parameters + (self.norm_tensor + self.update_tensor) * tensors,
        )


def counts_of(piece: str, amounts: Mapping[str, float]) -> dict[str, float]:
    """Return the amount that each constant of a piece multiplies."""
    constants = [constant for constant in fields(Costs) if piece in constant.metadata.get("pieces", ())]
    return {constant.name: amounts[constant.metadata["amount"]] for constant in constants}


@dataclass(frozen=True)
class Machine:
    """The constants that `bench machine` measured: `costs` of computation, `network`: a message between two ranks."""

    costs: Costs
    network: Network


def load_machine(path: str) -> Machine:
    """Read the file of `bench machine --json`. UsageError for another file, or one of a single rank (no messages)."""
    try:
        rows = json.loads(Path(path).read_text())
        values = {row["name"]: float(row["value"]) for row in rows if row["row"] == "constant"}
        costs = Costs(**{constant.name: values[constant.name] for constant in fields(Costs)})
        return Machine(costs=costs, network=Network(alpha=values["message_alpha"], beta=values["message_beta"]))
    except OSError as error:
        raise UsageError(f"--machine {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--machine {path} is not what `mpirun -n N python -m minipar.bench machine --json FILE` writes on two "
            f"ranks or more: {type(error).__name__} {error}"
        ) from None


def fit_costs(measured: Sequence[tuple[Shape, Mapping[str, float]]]) -> Costs:
    """Return the constants that are nearest to these measurements of `pieces`, by squared relative errors.

    A block's passes are fitted together, which gives the rate of products. The other pieces follow one by one.
    """
    constants = _fit_pieces(measured, BLOCK, rate=None)
    rate = 1 / constants.pop("seconds_per_flop")
    for piece in PIECES:
        if piece not in BLOCK:
            constants |= _fit_pieces(measured, (piece,), rate)
    return Costs(flops_per_second=rate, **constants)


def _fit_pieces(
    measured: Sequence[tuple[Shape, Mapping[str, float]]], pieces: Sequence[str], rate: float | None
) -> dict[str, float]:
    """Fit the constants of these pieces, and their seconds per FLOP unless the rate is known."""
    rows: list[dict[str, float]] = []
    seconds, known = [], []
    for shape, times in measured:
        amounts = amounts_of(shape, times["parameters"])
        for piece in pieces:
            counts = counts_of(piece, amounts)
            rows.append(counts if rate else {"seconds_per_flop": flops(piece, amounts)} | counts)
            seconds.append(times[piece])
            known.append(flops(piece, amounts) / rate if rate else 0.0)
    names = list(dict.fromkeys(name for row in rows for name in row))
    features = [[row.get(name, 0.0) for name in names] for row in rows]
    return dict(zip(names, fit(features, seconds, known).tolist(), strict=True))


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] = ()) -> np.ndarray:
    """Return the c >= 0 that minimizes the sum over i of ((known[i] + features[i] @ c) / seconds[i] - 1)^2.

    features (n, k), n >= k; known: seconds that need no constant (default 0). A small measurement counts as much as a
    large one. With few constants, every choice of those that are not zero can be tried; the best one without a negative
    constant is the minimum (Lawson and Hanson 1974, chapter 23).
    """
    measured = np.asarray(seconds, dtype=float)
    relative = np.asarray(features, dtype=float) / measured[:, None]  # (n, k)
    target = 1 - (np.asarray(known) if len(known) else 0) / measured  # (n,)
    count = relative.shape[1]
    best, least = np.zeros(count), float((target**2).sum())
    for chosen in (chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)):
        columns = relative[:, list(chosen)]
        scale = np.abs(columns).max(axis=0)  # seconds per byte next to seconds per call: 1e-9 next to 1e-5
        constants = np.linalg.lstsq(columns / scale, target)[0] / scale
        error = float(((columns @ constants - target) ** 2).sum())
        if (constants >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[list(chosen)] = constants
    return best
