"""The traffic of context parallelism in closed form: what attention sends over cp.

All else follows from the core's forms. To them dp x cp is one axis, over which gradients are
summed, and a rank of it has T/c tokens of each sample. Seams of the core: `StepLayout`.
"""

from minipar.parallel.layout import StepLayout


def cp_bytes(layout: StepLayout, method: str, ranks: int, pp: int) -> int:
    """Compute what attention sends over c ranks: per microbatch and layer, with u = B T/c tokens,

        ring         2(c-1) u h_kv elements   and in backward as many, and 2c u h_kv: the gradients make c hops
        all-gather   2(c-1) u h_kv            and in backward 4(c-1) u h_kv
        ulysses      2(h + h_kv) u (c-1)/c    and in backward the same

    With recompute forward runs again. Under tensor parallelism a rank has h/t and h_kv/t columns.
    """
    h = layout.model.n_embd // layout.tp
    kv_heads = layout.model.n_kv_head // layout.tp
    h_kv = kv_heads * (layout.model.n_embd // layout.model.n_head)
    moved, summed = cp_elements(method, ranks, layout.tokens, h, h_kv)
    passes = 3 if layout.recompute else 2
    each = passes * moved * layout.itemsize + summed * layout.reduce_itemsize
    return layout.microbatches * layout.blocks(pp) * each


def cp_elements(method: str, c: int, u: int, h: int, h_kv: int) -> tuple[int, int]:
    """Count a layer's elements of `cp_bytes` in a microbatch: (moved in each pass, gradients)."""
    if method == "ulysses" or c == 1:
        return 2 * (h + h_kv) * u * (c - 1) // c, 0
    hops = c if method == "ring" else c - 1
    return 2 * (c - 1) * u * h_kv, 2 * hops * u * h_kv
