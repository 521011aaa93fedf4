"""Plan Mixtral 8x7B on 64 H100 with 4 million tokens in a step (section 12.9)."""

from typing import Any

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.search import plan
from minipar.plan.space import SearchSpace

SAMPLES, LENGTH = 1024, 4096


def plan_mixtral(**fixed: Any) -> Any:
    """Return the fastest plan with these fields of the SearchSpace fixed."""
    space = SearchSpace(attention="flash", precision=PRECISIONS["bf16"], **fixed)
    return plan(find_model("mixtral-8x7b"), Cluster(GPUS["h100"], 64), SAMPLES, LENGTH, space, top=1).plans[0]
