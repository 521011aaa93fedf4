"""Layouts that no search has chosen, and the planner's report of each as text.

`PYTHONPATH=tests/helpers python -m layout_cases` writes tests/plan/recorded/layouts again: look at the difference
before it is committed.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plan_cases import json_lines
from planning import layout

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import ModelShape, find_model
from minipar.plan.programs import PROGRAMS
from minipar.plan.report import as_json, as_text
from minipar.plan.request import Request
from minipar.plan.search import Candidate, SearchResult, judge
from minipar.plan.space import SearchSpace

RECORDED = Path(__file__).parents[1] / "plan" / "recorded" / "layouts"
BF16 = {"precision": PRECISIONS["bf16"], "attention": "flash"}
FEW_KEYS = replace(find_model("llama-3-8b"), kv_heads=2)
SMALL = ModelShape(12, 64, 4, 131, 16)


@dataclass(frozen=True)
class Case:
    """Layouts that all have the same number of GPUs and of samples, and what their report needs."""

    model: ModelShape
    layouts: list[Layout]
    program: str = "megatron"
    gpu: str = "a100"
    per_host: int = 8
    length: int = 1024
    exact: bool = True
    space: SearchSpace = field(default_factory=SearchSpace)


def two_microbatches(**given: Any) -> Layout:
    """Make a layout of two microbatches in bf16 with sequence parallelism."""
    return layout(microbatches=2, sequence_parallel=True, **BF16, **given)


CASES = {
    "schedules": Case(
        find_model("gpt2"),
        [
            layout(pp=3, microbatches=24, schedule="1f1b"),
            layout(pp=3, microbatches=24, schedule="zb-h1"),
            layout(pp=3, microbatches=24, schedule="zb-h2"),
            layout(pp=3, microbatches=24, schedule="naive"),
            layout(pp=3, microbatches=24, schedule="interleaved-1f1b", virtual_stages=2),
            layout(pp=3, microbatches=24, schedule="zbv"),
            layout(dp=3, microbatches=8),
        ],
        per_host=3,
    ),
    "closed_forms": Case(
        find_model("gpt2"),
        [
            layout(dp=2, pp=2, microbatches=4, zero=1, schedule="zb-h1", recompute="selective"),
            layout(dp=2, pp=2, microbatches=4, zero=2, recompute="full"),
            layout(dp=2, pp=2, microbatches=4, zero=3, schedule="interleaved-1f1b", virtual_stages=3),
        ],
        program="megatron-2021",
        per_host=2,
        exact=False,
    ),
    "minipar_pipelines": Case(
        find_model("gpt2"),
        [
            layout(dp=2, pp=3, microbatches=7, zero=0),
            layout(dp=2, pp=3, microbatches=7, zero=1, schedule="zb-h1"),
            layout(dp=2, pp=3, microbatches=7, zero=2, recompute="full"),
            layout(dp=2, pp=3, microbatches=7, zero=3, schedule="zb-h2"),
            layout(dp=2, pp=3, microbatches=7, zero=3, zero_replicas=2, schedule="gpipe"),
        ],
        program="minipar",
        per_host=2,
    ),
    "megatron_pipelines": Case(
        find_model("llama-3-8b"),
        [
            layout(dp=2, tp=2, pp=2, microbatches=6, zero=2, sequence_parallel=True, schedule="zb-h1", **BF16),
            layout(dp=2, tp=2, pp=2, microbatches=6, zero=3, schedule="interleaved-1f1b", virtual_stages=2, **BF16),
            layout(dp=2, tp=2, pp=2, microbatches=6, zero=3, schedule="zb-h1", **BF16),
            layout(dp=4, tp=2, microbatches=3, zero=1, recompute="full", **BF16),
        ],
        gpu="h100",
        per_host=4,
        length=4096,
        space=SearchSpace(precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "experts": Case(
        find_model("mixtral-8x7b"),
        [
            two_microbatches(dp=2, tp=4, ep=2, etp=2, zero=1),
            two_microbatches(dp=2, tp=4, ep=8, etp=1, zero=3, recompute="full"),
            two_microbatches(dp=2, tp=4, ep=2, zero=2, cp_order="contiguous"),
            two_microbatches(dp=2, cp=2, tp=2, ep=4, etp=1, context_parallel="all-gather"),
            two_microbatches(dp=2, cp=4, ep=4, zero=1, cp_order="contiguous"),
            two_microbatches(dp=2, pp=4, ep=2, zero=1),
        ],
        gpu="h100",
        per_host=4,
        length=4096,
        space=SearchSpace(cp=(1, 2, 4), precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "minipar_experts": Case(
        find_model("mixtral-8x7b"),
        [
            two_microbatches(dp=2, tp=4, ep=2, etp=2, zero=1),
            two_microbatches(dp=2, cp=4, ep=8, zero=3),
            two_microbatches(dp=2, cp=2, tp=2, ep=2, etp=2, context_parallel="ulysses"),
        ],
        program="minipar",
        gpu="h200",
        per_host=4,
        length=4096,
        space=SearchSpace(cp=(2, 4), precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "host": Case(
        find_model("llama-3-8b"),
        [
            layout(dp=2, tp=4, microbatches=4, zero=1, sequence_parallel=True, recompute="full", **BF16),
            layout(dp=2, tp=4, microbatches=4, zero=2, sequence_parallel=True, **BF16),
            layout(dp=1, tp=4, pp=2, microbatches=8, sequence_parallel=True, **BF16),
            layout(dp=1, tp=4, pp=2, microbatches=8, **BF16),
        ],
        program="nanotron",
        gpu="h100",
        per_host=4,
        length=2048,
        space=SearchSpace(precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "plain": Case(
        find_model("gpt2-xl"),
        [layout(dp=2, tp=5, microbatches=2, zero=2, **BF16), layout(dp=1, tp=5, pp=2, microbatches=4, **BF16)],
        program="llama-3",
        per_host=5,
        space=SearchSpace(precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "steps_of_many": Case(
        find_model("gpt2-large"),
        [
            layout(dp=4, microbatches=5, zero=3),
            layout(dp=4, microbatches=5, zero=2, recompute="full"),
            layout(dp=4, microbatches=5, zero=3, zero_replicas=2, recompute="selective"),
        ],
        program="deepspeed-2021",
        per_host=2,
    ),
    "copies": Case(
        FEW_KEYS,
        [
            layout(dp=2, tp=8, microbatches=2, zero=1, **BF16),
            layout(dp=2, cp=2, tp=4, microbatches=2, zero=2, context_parallel="all-gather", **BF16),
            layout(dp=2, cp=2, tp=4, microbatches=2, sequence_parallel=True, cp_order="contiguous", **BF16),
        ],
        gpu="h100",
        per_host=2,
        length=4096,
        space=SearchSpace(cp=(1, 2), precision=PRECISIONS["bf16"], attention="flash"),
    ),
    "tiny": Case(
        SMALL,
        [layout(dp=2, tp=2, zero=1), layout(tp=2, pp=2, microbatches=2), layout(dp=2, pp=2, cp_order="contiguous")],
        gpu="v100",
        length=16,
        program="minipar",
        space=SearchSpace(tp=2, sequence_parallel=False),
    ),
    "one": Case(SMALL, [layout(microbatch=2)], gpu="v100", length=16, exact=False),
}


def reported(case: Case) -> str:
    """Return the report's text and its JSON, of which a plan and each part have a line."""
    first = case.layouts[0]
    program = PROGRAMS[case.program]
    cluster = Cluster(GPUS[case.gpu], first.gpus, case.per_host, program.assumptions, program.framework)
    plans = []
    meshes = []
    for one in case.layouts:
        judged = judge(case.model, one, cluster, first.samples, case.length, case.exact)
        plans.append(judged)
        meshes.append(Candidate(seconds=judged.time.total, nbytes=judged.memory.total, layout=one))
    plans.sort(key=lambda plan: plan.time.total)
    request = Request(
        model=case.model,
        cluster=cluster,
        global_batch=first.samples,
        length=case.length,
        space=case.space,
        name="a-model",
        gpu=case.gpu,
        program=case.program,
        spread=program.spread,
        evidence=program.evidence,
    )
    result = SearchResult(plans=plans, examined=1234, fitting=987, meshes=meshes)
    lines = [as_text(request, result), *json_lines(as_json(request, result))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (RECORDED / f"{name}.txt").write_text(reported(case), encoding="utf-8")
