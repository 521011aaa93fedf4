"""Ask the planner where a model of 39 billion parameters can lie on sixteen GPUs, which chapter 9 begins with."""

from dataclasses import asdict

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import memory
from minipar.plan.step_time import step_time

MODEL, TOKENS, SAMPLES = "megatron-39b", 4096, 64  # of the global batch; a microbatch has one sample
ROOM = 80e9  # bytes of an A100
USED = 0.92  # of these a program can use this share
TWICE = ", every forward twice"
GRID = "dp 2 x tp 4 x pp 2, ZeRO 1"


def layout(dp: int, tp: int, pp: int, zero: int = 0, recompute: str = "selective") -> Layout:
    """Return a layout of 16 GPUs. Scores of attention are computed again in backward in all of them."""
    sizes = {"dp": dp, "tp": tp, "pp": pp, "microbatch": 1, "microbatches": SAMPLES // dp}
    return Layout(**sizes, zero=zero, sequence_parallel=tp > 1, recompute=recompute)


LAYOUTS = {
    "dp 16": layout(16, 1, 1),
    "dp 16, ZeRO 3": layout(16, 1, 1, 3),
    f"dp 16, ZeRO 3{TWICE}": layout(16, 1, 1, 3, "full"),
    "pp 16": layout(1, 1, 16),
    f"pp 16{TWICE}": layout(1, 1, 16, 0, "full"),
    "tp 16": layout(1, 16, 1),
    GRID: layout(2, 4, 2, 1),
}


def places() -> dict[str, tuple[dict[str, float], float | None]]:
    """Return the parts of the fullest GPU's memory, and the seconds of a step if they fit, for each layout."""
    model, cluster, found = find_model(MODEL), Cluster(GPUS["a100"], 16), {}
    for label, one in LAYOUTS.items():
        held = memory(model, one, TOKENS)
        fits = held.total <= USED * ROOM
        found[label] = asdict(held), step_time(model, one, cluster, TOKENS).total if fits else None
    return found
