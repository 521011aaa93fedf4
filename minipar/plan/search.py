"""The search: every layout of a model on a cluster, those that fit, and the fastest."""

from dataclasses import dataclass
from itertools import islice

from minipar.errors import UsageError
from minipar.plan.advice import nothing_fits
from minipar.plan.cluster import Cluster
from minipar.plan.layout import Layout, check_layout
from minipar.plan.model import ModelShape, utilization
from minipar.plan.pipeline_time import simulated_actions
from minipar.plan.rank_bytes import Memory, Volume, memory, volume
from minipar.plan.space import EVERYTHING, Question, SearchSpace
from minipar.plan.step_time import StepTime, step_time

TOP = 5  # plans that are simulated and shown
MOST_LAYOUTS = 25_000  # a search through as many takes some ten seconds
# Actions in a search, some ten seconds too; plans after them keep their closed form.
MOST_SIMULATED = 150_000


@dataclass(frozen=True)
class Plan:
    """A layout and its predictions: model and hardware FLOPs utilization, and TFLOP/s per GPU with
    recomputation.
    """

    layout: Layout
    memory: Memory
    time: StepTime
    volume: Volume
    mfu: float
    hfu: float
    tflops: float


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with the seconds of its step in closed form and the bytes of its fullest
    rank.
    """

    seconds: float
    nbytes: float
    layout: Layout


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    plans      the fastest layout of each of the best meshes (dp, cp, tp, pp, ep and etp),
               simulated, fastest first
    examined   the number of layouts, of which `fitting` fit
    meshes     the fastest layout of each mesh in closed form, fastest first
    """

    plans: list[Plan]
    examined: int
    fitting: int
    meshes: list[Candidate]


def plan(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    length: int,
    space: SearchSpace = EVERYTHING,
    top: int = TOP,
) -> SearchResult:
    """Search for the fastest layout of each mesh. Thousands are compared in closed form, the `top`
    ones simulated.

    UsageError if no layout divides, or none fits; it says how much memory the smallest needs and
    what would fit. Also if there are more than MOST_LAYOUTS.
    """
    question = Question(model, cluster, global_batch, length, space)
    examined = list(islice(question.layouts(), MOST_LAYOUTS + 1))
    if len(examined) > MOST_LAYOUTS:
        raise UsageError(
            f"more than {MOST_LAYOUTS} layouts: narrow the search, with --tp, --cp, --pp, --dp, --ep, --etp, "
            "--microbatch, --zero-stage, --schedule, --recompute or --sequence-parallel"
        )
    best: dict[tuple[int, ...], Candidate] = {}
    fitting = 0
    for layout in examined:
        nbytes = memory(model, layout, length, cluster.framework).total
        if nbytes > cluster.usable_memory:
            continue
        fitting += 1
        seconds = step_time(model, layout, cluster, length, exact=False).total
        mesh = *layout.axes, layout.expert_tp
        if mesh not in best or seconds < best[mesh].seconds:
            best[mesh] = Candidate(seconds=seconds, nbytes=nbytes, layout=layout)
    if not best:
        raise UsageError(nothing_fits(question))
    candidates = sorted(best.values(), key=lambda candidate: candidate.seconds)
    plans: list[Plan] = []
    actions = 0
    for candidate in candidates[:top]:
        layout = candidate.layout
        simulates = actions <= MOST_SIMULATED
        plans.append(judge(model, layout, cluster, global_batch, length, exact=simulates))
        if plans[-1].time.exact:
            actions += simulated_actions(layout)
    plans.sort(key=lambda plan: plan.time.total)
    return SearchResult(plans=plans, examined=len(examined), fitting=fitting, meshes=candidates)


def judge(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    global_batch: int,
    length: int,
    exact: bool = True,
) -> Plan:
    """Predict one layout, its pipeline simulated if `exact` and if its schedule is not too long for
    that.

    UsageError for a layout that contradicts the model, the batch or the number of GPUs.
    """
    check_layout(model, layout, cluster.gpus, global_batch, length)
    time = step_time(model, layout, cluster, length, exact)
    flops = global_batch * model.model_flops(length)
    hardware_flops = global_batch * model.hardware_flops(length, layout.recompute)
    return Plan(
        layout=layout,
        memory=memory(model, layout, length, cluster.framework),
        time=time,
        volume=volume(model, layout, length, cluster.framework),
        mfu=utilization(flops, time.total, cluster.gpus, cluster.gpu.peak),
        hfu=utilization(hardware_flops, time.total, cluster.gpus, cluster.gpu.peak),
        tflops=hardware_flops / time.total / cluster.gpus / 1e12,
    )
