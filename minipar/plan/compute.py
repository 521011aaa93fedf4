"""Seconds of computation alone: of the parts of a model for one microbatch on one rank, and of the update.

On a GPU they come from its peak and bandwidth and from the assumptions (`gpu_compute`); a machine that was measured
brings its own (Cluster.measured; `python -m minipar.bench machine` measures).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minipar.plan.layout import Layout
from minipar.plan.machine import Assumptions, Gpu
from minipar.plan.memory import layer_activations
from minipar.plan.model import ModelShape
from minipar.plan.program import MEGATRON


@dataclass(frozen=True)
class Compute:
    """Seconds. F, I and W of one layer, of the output head with the loss, and of the embedding; `again`: what
    recomputation adds to I of a layer; `update`: the whole optimizer step of a rank.
    """

    forward: float
    backward_input: float
    backward_weight: float
    again: float
    head_forward: float
    head_backward_input: float
    head_backward_weight: float
    embedding_forward: float
    embedding_backward: float
    update: float


def gpu_compute(model: ModelShape, layout: Layout, length: int, parameters: float, gpu: Gpu, a: Assumptions) -> Compute:
    """From a GPU's printed numbers. `parameters`: that the rank updates.

    Products take their operations at the rate that their size reaches; elementwise kernels the bytes that forward keeps
    (Korthikanti et al. 2022), a few times over; the optimizer the bytes that it reads and writes.
    """
    t = layout.tp
    tokens = layout.microbatch * length
    seconds_per_byte = 1 / (gpu.memory_bandwidth * a.copies)

    def products(flops: float, count: int) -> float:
        """`count` products on each tp rank."""
        return flops / t / (gpu.peak * a.products) * (1 + a.half_work * count * t / flops)

    flops = layout.microbatch * model.layer_flops(length)
    core = layout.microbatch * model.attention_core_flops(length)
    kept, unscored = (
        layer_activations(model, replace(layout, recompute=kind), length) for kind in ("none", "selective")
    )
    forward = products(flops, 4) + a.forward_traffic * kept * seconds_per_byte
    core_forward = products(core, 2) + a.forward_traffic * (kept - unscored) * seconds_per_byte
    logits = products(layout.microbatch * model.head_flops(length), 1)
    softmax = MEGATRON.kept.logits * layout.precision.parameters * tokens * model.vocab_size / t * seconds_per_byte
    tiles = products(core, 2) if layout.attention == "flash" else 0.0  # the scores once more, beside their gradients
    return Compute(
        forward=forward,
        backward_input=products(flops + core, 4) + tiles / 2 + a.backward_traffic * kept * seconds_per_byte,
        backward_weight=products(flops - core, 4),
        again={"none": 0.0, "selective": core_forward, "full": forward}[layout.recompute],
        head_forward=logits + a.forward_traffic * softmax,
        head_backward_input=logits + a.backward_traffic * softmax,
        head_backward_weight=logits,
        embedding_forward=0.0,
        embedding_backward=0.0,
        update=parameters * a.update_traffic * seconds_per_byte,
    )
