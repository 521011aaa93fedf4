"""Strategies applied to a serial model, which does not know that it is parallel. They meet in one function:

    parallelize.py   context, tensor, expert, pipeline and data parallelism, in order

    ddp.py    data parallelism; the mechanism is in buckets.py, the loss in loss.py      tensor/      split layers
    zero.py   ZeRO stages 1 and 2, with shards.py                                        pipeline/    stages, schedules
    fsdp.py   ZeRO stage 3                                                               context.py   split sequences
    zero_optimizer.py   stage 1 as an optimizer                                          expert.py    shared experts

context.py has a method in ulysses.py, and both share token_order.py.

Each records in every parameter's Placement (placement.py) what it does to the parameter. What needs all axes is a loop
over placements: grad_norm.py, state.py, memory.py, traffic.py (those of
layout.py). The helpers of data parallelism know no strategy:
groups.py says which parameters travel together, hybrid.py how, and guards.py and step_guard.py refuse mistakes.
"""

# All that a strategy may set, or add to, on a model, its modules and its parameters. What one
# strategy needs from another is an argument (parallelize.py), never an attribute;
# tests/parallel/test_source.py compares this list with the code.
SET_BY_STRATEGIES = {
    "Parameter": ("data", "grad", "grad_buffer", "grad_dtype", "owners", "placement"),
    "Module": ("split_over", "forward", "loss_sum"),
    "Segment": ("run", "parameters"),
    "LanguageModel": ("project", "criterion", "positions"),
    "Dropout": ("mask_slices",),
    "SelfAttention": ("attention", "heads", "kv_heads"),
    "llama.Attention, llama.MLP": ("enter",),
    "MoE": ("enter", "leave", "experts", "run_experts", "load_sums"),
}
