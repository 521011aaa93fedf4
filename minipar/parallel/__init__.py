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
