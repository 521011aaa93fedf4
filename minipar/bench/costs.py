"""What minipar computes in, as few constants: CPU seconds of each piece of a training step, for a shape.

    block    F = flops / R + a_F kept + r parameters + c elements of hidden if tp > 1 + o_F
             I alike, with its own a and o; W = flops / R + a_W kept + o_W;  B = I + W
    more     W + g parameters                      for each microbatch after a step's first: gradients are added
    head     flops / R + a elements of logits + b elements of hidden + o, forward and backward
    embed    a elements of hidden + o, forward and backward
    norm     a parameters + o tensors: the gradient's norm; update (AdamW) alike

flops: of the matrix products (ModelShape.layer_flops / tp; I has those of the layers' matrices and twice attention's, W
those of the matrices). kept: bytes that the block keeps for backward as the papers count them (layer_activations: 16
bits, masks), in whose place all elementwise work is taken. parameters: of the block's matrices on the rank, which come
from memory. hidden: B T h; what tensor parallelism is to sum is copied first, whatever the network. R, r and c are the
same for all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from minipar.bench.fit import fit
from minipar.bench.pieces import BLOCKS, Shape
from minipar.plan.compute import Compute
from minipar.plan.layout import Layout
from minipar.plan.memory import layer_activations
from minipar.plan.model import ModelShape

Measured = Sequence[tuple[Shape, Mapping[str, float]]]
TENSORS = 12 * BLOCKS + 4  # that the optimizer goes through: of a block 12, two embeddings, the last norm's two


@dataclass(frozen=True)
class Costs:
    """Seconds per what the name says, and flops_per_second (float32, one thread).

    *_byte: per byte kept of a block;  *_block: once per block and pass;  *_logit: per element of the logits, *_hidden
    per element of (B, T, h), *_call once per pass;  *_parameter, *_tensor: per parameter and per tensor of them. With
    sequence parallelism the head has B T h / tp elements; embed_* and copy_hidden count all.
    """

    flops_per_second: float
    forward_byte: float
    input_byte: float
    weight_byte: float
    forward_block: float
    input_block: float
    weight_block: float
    read_parameter: float
    copy_hidden: float
    accumulate_parameter: float
    head_forward_logit: float
    head_forward_hidden: float
    head_forward_call: float
    head_backward_logit: float
    head_backward_hidden: float
    head_backward_call: float
    embed_forward_hidden: float
    embed_forward_call: float
    embed_backward_hidden: float
    embed_backward_call: float
    norm_parameter: float
    norm_tensor: float
    update_parameter: float
    update_tensor: float

    def seconds(self, piece: str, shape: Shape, parameters: float) -> float:
        """Of a piece as `pieces.pieces` names it; `parameters` of the rank, for the norm and the update."""
        return sum(self._terms(piece, shape, parameters))

    def compute(self, model: ModelShape, layout: Layout, length: int, parameters: float) -> Compute:
        """For the planner (Cluster.measured). What the microbatches after a step's first take more is spread over all;
        the output head's W is its products.
        """
        shape = Shape(
            model.hidden, model.heads, length, layout.microbatch, layout.tp, layout.sequence_parallel, model.vocab_size
        )
        took = {name: self.seconds(name, shape, parameters) for name in PIECES}
        m = layout.microbatches
        head_weight = flops("head B", shape) / 2 / self.flops_per_second
        again = took["F"] if layout.recompute == "full" else 0.0
        tensors = 12 * layout.layers_per_rank(model) + 4
        update = self.norm_parameter + self.update_parameter, self.norm_tensor + self.update_tensor
        return Compute(
            forward=took["F"],
            backward_input=took["I"],
            backward_weight=(took["W"] + (m - 1) * took["W more"]) / m,
            again=again,
            head_forward=took["head F"],
            head_backward_input=took["head B"] - head_weight,
            head_backward_weight=head_weight,
            embedding_forward=took["embed F"],
            embedding_backward=took["embed B"],
            update=update[0] * parameters + update[1] * tensors,
        )

    def _terms(self, piece: str, shape: Shape, parameters: float) -> Iterator[float]:
        constants = asdict(self)
        if piece in ("B", "B more"):
            yield from self._terms("I", shape, parameters)
            yield from self._terms("W" + piece[1:], shape, parameters)
            return
        yield flops(piece, shape) / self.flops_per_second
        for name, count in PIECES[piece](shape, parameters).items():
            yield constants[name] * count


def model_of(shape: Shape) -> ModelShape:
    """As the planner knows it; one layer."""
    return ModelShape(1, shape.hidden, shape.heads, shape.vocab_size, shape.seq_len)


def flops(piece: str, shape: Shape) -> float:
    """Of a piece's matrix products on one rank."""
    model, length = model_of(shape), shape.seq_len
    core = model.attention_core_flops(length)
    matrices, head = model.layer_flops(length) - core, model.head_flops(length)
    of = {"F": matrices + core, "I": matrices + 2 * core, "W": matrices, "W more": matrices}
    return (of | {"head F": head, "head B": 2 * head}).get(piece, 0) * shape.samples / shape.tp


def kept(shape: Shape) -> float:
    """Bytes that a block keeps of this microbatch on one rank, as the planner counts them."""
    layout = Layout(1, shape.tp, 1, shape.samples, 1, sequence_parallel=shape.sequence_parallel)
    return layer_activations(model_of(shape), layout, shape.seq_len)


def _hidden(shape: Shape) -> float:
    return shape.samples * shape.seq_len * shape.hidden


def _matrices(shape: Shape) -> float:
    return 12 * shape.hidden**2 / shape.tp


def _logits(shape: Shape) -> float:
    return shape.samples * shape.seq_len * shape.vocab_size / shape.tp


def _block(name: str) -> Callable[[Shape, float], dict[str, float]]:
    def count(shape: Shape, _: float) -> dict[str, float]:
        through = {"read_parameter": _matrices(shape), "copy_hidden": _hidden(shape) * (shape.tp > 1)}
        return {f"{name}_byte": kept(shape), f"{name}_block": 1.0} | through

    return count


def _weight(shape: Shape, _: float) -> dict[str, float]:
    return {"weight_byte": kept(shape), "weight_block": 1.0}


def _more(shape: Shape, _: float) -> dict[str, float]:
    return _weight(shape, 0) | {"accumulate_parameter": _matrices(shape)}


def _head(way: str) -> Callable[[Shape, float], dict[str, float]]:
    def count(shape: Shape, _: float) -> dict[str, float]:
        hidden = _hidden(shape) / (shape.tp if shape.sequence_parallel else 1)
        return {f"head_{way}_logit": _logits(shape), f"head_{way}_hidden": hidden, f"head_{way}_call": 1.0}

    return count


def _embed(way: str) -> Callable[[Shape, float], dict[str, float]]:
    return lambda shape, _: {f"embed_{way}_hidden": _hidden(shape), f"embed_{way}_call": 1.0}


def _optimizer(name: str) -> Callable[[Shape, float], dict[str, float]]:
    return lambda _, parameters: {f"{name}_parameter": parameters, f"{name}_tensor": float(TENSORS)}


# How often each constant counts in a piece, beside its products.
PIECES: dict[str, Callable[[Shape, float], dict[str, float]]] = {
    "F": _block("forward"),
    "I": _block("input"),
    "W": _weight,
    "W more": _more,
    "head F": _head("forward"),
    "head B": _head("backward"),
    "embed F": _embed("forward"),
    "embed B": _embed("backward"),
    "norm": _optimizer("norm"),
    "AdamW": _optimizer("update"),
}
BLOCK = ("F", "I", "W", "W more")  # fitted together: they share the rate of products


def fit_costs(measured: Measured) -> Costs:
    """The constants that are nearest to these measurements (`pieces.measure`), relative errors squared."""
    found = _fit(measured, BLOCK, None)
    rate = 1 / found.pop("seconds_per_flop")
    for piece in PIECES:
        if piece not in BLOCK:
            found |= _fit(measured, (piece,), rate)
    return Costs(flops_per_second=rate, **found)


def _fit(measured: Measured, pieces: Sequence[str], rate: float | None) -> dict[str, float]:
    """The constants of these pieces; also their seconds per FLOP, unless the rate is known."""
    counted, seconds, known = [], [], []
    for shape, found in measured:
        for piece in pieces:
            counts = PIECES[piece](shape, found["parameters"])
            counted.append(counts if rate else {"seconds_per_flop": flops(piece, shape)} | counts)
            seconds.append(found[piece])
            known.append(flops(piece, shape) / rate if rate else 0.0)
    names = list(dict.fromkeys(name for counts in counted for name in counts))
    features = [[counts.get(name, 0.0) for name in names] for counts in counted]
    return dict(zip(names, fit(features, seconds, known).tolist(), strict=True))
