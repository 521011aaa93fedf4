"""Strategies applied to a serial model, which does not know that it is parallel.

    ddp.py    data parallelism                                        tensor/      split layers
    zero.py   ZeRO stages 1 and 2                                     pipeline/    stages, schedules
    fsdp.py   ZeRO stage 3
    zero_optimizer.py   stage 1 as an optimizer

What the first three share knows no strategy: wrapper.py has what a script calls, buckets.py the parameters that travel
together, loss.py the global mean, chunks.py what ZeRO cuts, and contract.py refuses mistakes. Context and expert
parallelism are in minipar/more.

Each records in every parameter's Placement (placement.py) what it does to the parameter. What needs all axes is a loop
over placements: grad_norm.py, state.py, predicted_memory.py, predicted_traffic.py (those of layout.py).
"""
