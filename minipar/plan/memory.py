"""Memory of the fullest rank, in parts: model state, activations, buffers.

Model state: Rajbhandari et al. 2020 (parallel/model_state.py). Activations: Korthikanti et al. 2022 (arXiv 2205.05198),
equations 1 to 6 and section 4.2.3 for what a pipeline keeps in flight; 16-bit activations, one-byte dropout masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from minipar.parallel.memory import model_state
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.plan.pipeline import stages_per_rank
from minipar.plan.program import MEGATRON, Kept, Program


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # what is there for a while only: a gathered unit of ZeRO stage 3, a recomputed layer, logits

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def layer_state(model: ModelShape, tp: int) -> int:
    """Parameters of one layer on a rank: matrices and the biases of column layers are split, the rest is on every
    rank.
    """
    whole = 2 * model.norm_parameters + 2 * model.hidden * model.biases
    return -(-(model.layer_parameters - whole) // tp) + whole


def rank_parameters(model: ModelShape, layout: Layout) -> int:
    """Of the fullest pipeline rank, the first: embeddings and its layers; without a pipeline all."""
    embedding = -(-model.vocab_size * model.hidden // layout.tp) + model.positions * model.hidden
    own = embedding + layout.layers_per_rank(model) * layer_state(model, layout.tp)
    if layout.pp == 1:
        own += model.norm_parameters + (0 if model.tied else -(-model.vocab_size * model.hidden // layout.tp))
    return own


def layer_activations(model: ModelShape, layout: Layout, length: int, kept: Kept = MEGATRON.kept) -> float:
    """Bytes that one layer keeps of one microbatch, for backward.

    GPT-2 with s, b, h, a, t: without parallelism s b h (34 + 5as/h); tensor-parallel s b h (10 + 24/t + 5as/(ht)), with
    sequence parallelism all of it over t; "selective" recomputation drops the 5as/h, as flash attention
    does, "full" keeps the 2 s b h input.
    """
    h, t = model.hidden, layout.tp
    sliced = t if layout.sequence_parallel else 1
    tokens = length * layout.microbatch * layout.precision.parameters
    if layout.recompute == "full":
        return tokens * h / sliced
    stored = layout.recompute == "none" and layout.attention == "stored"
    core = kept.scores * model.heads * length if stored else 0
    split = kept.qkv * model.qkv + kept.context * h + (kept.gated if model.gated else kept.inner) * model.inner
    return tokens * ((kept.sliced * h + kept.rows) / sliced + kept.gathered * h + (split + core) / t)


def in_flight(layout: Layout) -> Fraction | int:
    """Microbatches whose activations the first rank keeps, each counted as all of the rank's layers."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual_stages
    match layout.schedule:
        case "gpipe":
            return m
        case "naive":
            return 1
        case "interleaved-1f1b" if v > 1:
            return min(Fraction(m), p * (1 + Fraction(p - 1, p * v)))
        case "zb-h2":
            return min(m, 2 * p - 1)
        case _:  # 1f1b, zb-h1, zbv
            return min(m, p)


def memory(model: ModelShape, layout: Layout, length: int, program: Program = MEGATRON) -> Memory:
    """What the fullest rank holds at its fullest.

    Where gradients are reduced after each microbatch (Program.every_microbatch), no rank keeps whole ones from stage 2
    on, as in DeepSpeed; else they add up in whole ones beside the rank's own part.
    """
    psi, precision = rank_parameters(model, layout), layout.precision
    accumulating = layout.microbatches > 1 and not program.every_microbatch
    state = model_state(psi, Fraction(psi, layout.dp), layout.zero, precision, accumulating)
    layers, kept = layout.layers_per_rank(model), layer_activations(model, layout, length, program.kept)
    tokens = length * layout.microbatch * precision.parameters
    hidden = tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    logits = program.kept.head * hidden + program.kept.logits * tokens * model.vocab_size / layout.tp
    flying = float(in_flight(layout))
    activations = flying * layers * kept
    if layout.pp > 1:  # the last rank has one microbatch in flight, and the logits
        # The first rank's first stage takes in no activations; GPipe's other ranks hold as many microbatches as it.
        ends = flying * (2 * stages_per_rank(layout.schedule, layout.virtual_stages) - (layout.schedule != "gpipe"))
        activations += program.kept.boundary * hidden * ends
        most = max(activations, layers * kept + logits)
    else:
        most = activations + logits
    buffers = most - activations + program.kept.moving * hidden + program.kept.moving_whole * tokens * model.hidden
    if layout.recompute == "full":
        buffers += layer_activations(model, replace(layout, recompute="none"), length, program.kept)
    if layout.zero == 3:  # the unit at work and the one that is fetched
        buffers += 2 * precision.parameters * layer_state(model, layout.tp)
    if layout.zero >= 2:
        buffers += 2 * precision.gradients * layer_state(model, layout.tp)
    return Memory(float(state.parameters), float(state.gradients), float(state.optimizer), activations, buffers)
