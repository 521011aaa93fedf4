"""Benchmarks, each with a baseline in the same run: `mpirun -n N python -m minipar.bench SUBCOMMAND --json FILE`.

    collectives.py   each collective next to MPI's own
    step.py          a training step next to PyTorch's; the ZeRO stages; the cost of synchronization (overlap)
    pipeline.py      the bubble of each pipeline schedule

The rest calibrates the planner and compares it with runs:

    pieces.py        the pieces of a step: their measured CPU seconds, and constants fitted to them
    machine.py       the constants of this machine
    layouts.py       predictions next to measured steps, on this machine and on a modelled cluster
"""
