"""Plan the three models of chapter 10, and prepare what pictures need."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from minipar.errors import UsageError
from minipar.plan.cluster import GPUS, Assumptions, Cluster
from minipar.plan.layout import Layout
from minipar.plan.model import RECOMPUTE, find_model
from minipar.plan.rank_bytes import memory
from minipar.plan.report import why
from minipar.plan.search import plan
from minipar.plan.space import SearchSpace, layouts
from minipar.plan.step_time import StepTime, step_time

SMALL, MIDDLE, LARGE = "megatron-7.5b", "llama-2-70b", "megatron-1t"
SHORT = {SMALL: "7.5B", MIDDLE: "70B", LARGE: "1T"}
LENGTH = {SMALL: 2048, MIDDLE: 4096, LARGE: 2048}  # tokens per sample, as they were trained
BATCH = {SMALL: 2048, MIDDLE: 1024, LARGE: 3072}  # samples of the global batch
# With sequence parallelism wherever there is tp. The planner tries both: without it backward waits for less (6.5), but
# here it wins nowhere, and the search takes twice as long.
ASK = SearchSpace(sequence_parallel=True)

Choice = dict[str, Any]
Place = tuple[str, str, int]  # model, kind of GPU, GPUs
Bars = dict[str, tuple[dict[str, float], float]]  # for each layout: seconds by part, and MFU
Curves = dict[str, dict[int, tuple[float, float]]]  # for each model and number of GPUs: tokens per second, and MFU


@dataclass(frozen=True)
class Funnel:
    """The layouts that are left after each of three tests, and the steps' times of those that fit."""

    every: list[Layout]
    fitting: list[Layout]  # into memory
    quiet: list[Layout]  # of these: wait for messages at most 10 % of a step
    busy: list[Layout]  # of these: idle at most 10 % of it in the bubble
    times: dict[Layout, StepTime]


def funnel() -> Funnel:
    """Put all layouts of Llama 2 70B on 1,024 A100s through the tests of memory, bandwidth and bubble."""
    model = find_model(MIDDLE)
    cluster = Cluster(GPUS["a100"], 1024)
    length = LENGTH[MIDDLE]
    every = list(layouts(model, cluster, BATCH[MIDDLE], ASK))
    fitting = [layout for layout in every if memory(model, layout, length).total <= cluster.usable_memory]
    times = {layout: step_time(model, layout, cluster, length, exact=False) for layout in fitting}
    quiet = []
    for layout in fitting:
        time = times[layout]
        if time.tp + time.pp + time.dp <= 0.1 * time.total:
            quiet.append(layout)
    busy = [layout for layout in quiet if times[layout].bubble <= 0.1 * times[layout].total]
    return Funnel(every=every, fitting=fitting, quiet=quiet, busy=busy, times=times)


def first_choice(name: str, kind: str, gpus: int) -> Choice | None:
    """Search for the best layout of a model on so many GPUs of a kind; None if nothing fits. Values are JSON's."""
    try:
        search = plan(find_model(name), Cluster(GPUS[kind], gpus), BATCH[name], LENGTH[name], ASK, top=3)
    except UsageError:
        return None
    first, *others = search.plans
    return {
        "mesh": (first.layout.dp, first.layout.tp, first.layout.pp),
        "layout": str(first.layout),
        "zero": first.layout.zero,
        "time": {part: seconds for part, seconds in asdict(first.time).items() if part != "exact"},
        "total": first.time.total,
        "mfu": first.mfu,
        "tokens": BATCH[name] * LENGTH[name] / first.time.total,
        "next": f"{others[0].layout}: {why(first, others[0])}" if others else "",
    }


def spending(plans: Mapping[Place, Choice | None], kind: str) -> dict[str, Bars]:
    """Return {model: {layout, a word in a line: (seconds by part, MFU)}} for one kind of GPU, smallest model first."""
    bars: dict[str, Bars] = {name: {} for name in SHORT.values()}
    for (name, gpu, gpus), choice in plans.items():
        if gpu == kind and choice:
            d, t, p = choice["mesh"]
            label = f"{gpus} GPUs\ndp {d}\ntp {t}\npp {p}\nZeRO-{choice['zero']}"
            bars[SHORT[name]][label] = choice["time"], choice["mfu"]
    return bars


def scaling(plans: Mapping[Place, Choice | None]) -> dict[str, Curves]:
    """Return {kind of GPU: {model: {GPUs: (tokens per second, MFU)}}}."""
    curves: dict[str, Curves] = {}
    for (name, kind, gpus), choice in plans.items():
        if choice:
            points = curves.setdefault(kind.upper(), {}).setdefault(SHORT[name], {})
            points[gpus] = choice["tokens"], choice["mfu"]
    return curves


def fastest(t: int, p: int, zero: int, gpus: int) -> tuple[float, str] | None:
    """Return the seconds of a step of Llama 2 70B on A100s with this tp, pp and ZeRO stage, and its recompute.

    The microbatch and the recompute are the best of those that fit; None if none does.
    """
    model = find_model(MIDDLE)
    cluster = Cluster(GPUS["a100"], gpus)
    length = LENGTH[MIDDLE]
    d = gpus // (t * p)
    choices = []
    for microbatch, recompute in product((1, 2, 4, 8, 16), RECOMPUTE):
        m, rest = divmod(BATCH[MIDDLE], d * microbatch)
        if m and not rest:
            layout = Layout(d, t, p, microbatch, m, zero, sequence_parallel=t > 1, recompute=recompute)
            if memory(model, layout, length).total < cluster.usable_memory:
                choices.append((step_time(model, layout, cluster, length).total, recompute))
    return min(choices) if choices else None


def first_with_1f1b(name: str, gpus: int, batch: int) -> tuple[tuple[int, int, int], float, str]:
    """Return (dp, tp, pp), the seconds and the text of the planner's first layout on A100s, with 1F1B."""
    space = replace(ASK, schedule="1f1b")
    first = plan(find_model(name), Cluster(GPUS["a100"], gpus), batch, 2048, space).plans[0]
    return (first.layout.dp, first.layout.tp, first.layout.pp), first.time.total, str(first.layout)


def small_on_4096(batches: int, assumptions: Assumptions) -> tuple[float, str]:
    """Return MFU and layout of the 7.5B on 4096 A100s, with so many times its batch."""
    cluster = Cluster(GPUS["a100"], 4096, assumptions=assumptions)
    first = plan(find_model(SMALL), cluster, batches * BATCH[SMALL], LENGTH[SMALL], ASK).plans[0]
    return first.mfu, str(first.layout)
