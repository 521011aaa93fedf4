"""Seconds of computation of one microbatch on a GPU, from its data sheet and the assumptions."""

from dataclasses import replace

from minipar.plan.cluster import Cluster, ComputeTime
from minipar.plan.layout import MEGATRON, Framework, Layout
from minipar.plan.model import ModelShape
from minipar.plan.rank_bytes import layer_activations


def attention_squares(layout: Layout, framework: Framework = MEGATRON) -> list[float]:
    """Return what the busiest rank computes of each of cp ranks' keys, its own first; 1 is (s/c)^2
    pairs of tokens.

    All pairs count, as in the published formulas: twice those that a query sees. A rank sees half
    of its own square. In zig-zag order it sees half of each other one, too, c squares in all. In
    contiguous order the last rank sees all of them: 2c - 1 squares, so that the efficiency is
    c/(2c-1). Ulysses' heads have c squares each, in one product.
    """
    if layout.context_parallel == "ulysses" or layout.cp == 1:
        return [layout.cp]
    other = (1 if layout.cp_order == "zigzag" else 2) / (2 if framework.visible_pairs else 1)
    return [1, *[other] * (layout.cp - 1)]


def core_flops(model: ModelShape, layout: Layout, length: int, squares: float) -> float:
    """Return the forward operations of so many squares of attention (`attention_squares`), of all
    tp ranks.
    """
    return layout.microbatch * model.attention_core_flops(length // layout.cp) * squares


def gpu_compute(
    model: ModelShape, layout: Layout, length: int, parameters: float, cluster: Cluster
) -> ComputeTime:
    """Return the seconds of computation on a GPU; `parameters` are those that the rank updates.

    A product of f FLOPs takes (f + half_work) / product_rate; those of flash attention run at
    attention_rate. Elementwise kernels move the bytes that forward keeps (Korthikanti et al. 2022)
    `forward_traffic` or `backward_traffic` times; the optimizer moves `update_traffic` bytes per
    parameter. Each of a rank's experts has two products of its own, so that few large ones take
    less time.
    """
    t = layout.tp
    a = cluster.assumptions
    tokens = layout.tokens(length)
    seconds_per_byte = 1 / (cluster.gpu.memory_bandwidth * a.copies)
    rate = cluster.product_rate
    core_rate = rate if layout.stores_scores else cluster.attention_rate

    def products(flops: float, count: int, rate: float = rate) -> float:
        """Return the seconds of `count` products that have `flops` together, divided over the tp
        ranks.
        """
        return (flops / t + a.half_work * count) / rate

    experts = (model.experts or 1) // layout.ep
    matrices = products(2 * tokens * model.layer_matrices, 2 + 2 * experts)
    squares = sum(attention_squares(layout, cluster.framework))
    core = core_flops(model, layout, length, squares)
    core_alone = products(core, 2, core_rate)
    kept = layer_activations(model, replace(layout, recompute="none"), length)
    scores = kept - layer_activations(model, replace(layout, recompute="selective"), length)
    forward = matrices + products(core, 0, core_rate)
    forward += a.forward_traffic * kept * seconds_per_byte
    backward = matrices + products(2 * core, 0, core_rate)
    if not layout.stores_scores:
        # Flash attention computes the scores once more, next to their gradients: the first of the
        # core's two products.
        backward += core_alone / 2
    backward += a.backward_traffic * kept * seconds_per_byte
    again = core_alone + a.forward_traffic * scores * seconds_per_byte
    logits = products(model.head_flops(tokens), 1)
    elements = MEGATRON.kept.logits * layout.precision.parameters * tokens * model.vocab_size
    softmax = elements / t * seconds_per_byte
    return ComputeTime(
        forward=forward,
        backward_input=backward,
        backward_weight=matrices,
        recompute={"none": 0.0, "selective": again, "full": forward}[layout.recompute],
        head_forward=logits + a.forward_traffic * softmax,
        head_backward_input=logits + a.backward_traffic * softmax,
        head_backward_weight=logits,
        embedding_forward=0.0,
        embedding_backward=0.0,
        update=parameters * a.update_traffic * seconds_per_byte,
    )
