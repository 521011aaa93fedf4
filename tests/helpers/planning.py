"""Short ways to write layouts and clusters in the planner's tests, and to read its tables."""

import re

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.programs import PROGRAMS


def layout(**given):
    """One GPU and one sample unless said otherwise."""
    return Layout(**({"dp": 1, "tp": 1, "pp": 1, "microbatch": 1, "microbatches": 1} | given))


def a100s(gpus, program="megatron"):
    runs = PROGRAMS[program]
    return Cluster(GPUS["a100"], gpus, framework=runs.framework, assumptions=runs.assumptions)


def tables(text):
    """Return for each table of a report the words of its title, its names, and its rows of words."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    found = []
    for block in blocks:
        for place, line in enumerate(block):
            if line.startswith("1. "):
                rows = [each.split() for each in block[place:] if re.match(r" *\d+\.", each)]
                found.append((" ".join(block[: place - 1]), block[place - 1].split(), rows))
    return found
