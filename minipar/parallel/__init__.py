"""Strategies applied to a serial model, which does not know that it is parallel. Each is one file that reads alone:

    ddp.py       data parallelism                       tensor/      tensor and sequence parallelism
    zero.py      ZeRO stages 1 and 2                    pipeline/    schedules and their execution
    fsdp.py      ZeRO stage 3                           context.py   context parallelism

Each records in every parameter's Placement (placement.py) what it does to the parameter. What needs all axes is a loop
over placements: grad_norm.py, state.py, traffic.py, memory.py. Shared by ddp, zero and fsdp: wrapper.py (the loss, the
hooks that send buckets during backward, the checks of a user's script) and buckets.py; by the ZeRO stages: sharding.py.
"""
