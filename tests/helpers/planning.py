"""Short ways to write layouts and clusters in the planner's tests."""

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.programs import PROGRAMS


def layout(**given):
    """One GPU and one sample unless said otherwise."""
    return Layout(**({"dp": 1, "tp": 1, "pp": 1, "microbatch": 1, "microbatches": 1} | given))


def a100s(gpus, program="megatron"):
    runs = PROGRAMS[program]
    return Cluster(GPUS["a100"], gpus, framework=runs.framework, assumptions=runs.assumptions)
