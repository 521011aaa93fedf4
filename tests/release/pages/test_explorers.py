"""Claims about the site's explorers: for random settings, their JavaScript computes what Python computes, with ==.

MINIPAR_EXPLORER_SETTINGS=1000 compares so many settings of each explorer instead of 100 (`make site` does). node
computes all in one process.
"""

import json
import os
import random
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
from launcher import ROOT

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.predicted_memory import FLOAT32, FLOAT64, model_state
from minipar.plan.layout import PRECISIONS, Layout, check_layout
from minipar.plan.model import MODELS, ModelShape
from minipar.plan.rank_bytes import memory, volume
from minipar.plan.space import schedules
from visualize.mesh import LOOKS
from visualize.schedule import live_activations
from visualize.style import COLOURS

NODE = shutil.which("node")
PLANNED = [name for name in SCHEDULES if name != "dualpipev"]  # whose pairs the planner does not know
pytestmark = pytest.mark.skipif(NODE is None, reason="the explorers are JavaScript, and there is no node to run them")

SETTINGS = int(os.environ.get("MINIPAR_EXPLORER_SETTINGS", "100"))
WIDTHS = {
    "mixed": PRECISIONS["fp16"],
    "mixed, gradients in 32 bits": PRECISIONS["bf16"],
    "float32": FLOAT32,
    "float64": FLOAT64,
}


# ---- random settings -------------------------------------------------------------------------------------------------


def random_schedule(rng):
    """Times are eighths, also after the division by v, so that every sum of them is exact."""
    name, v = rng.choice(list(SCHEDULES)), rng.randint(1, 4)
    stages = {"interleaved-1f1b": v, "zbv": 2, "dualpipev": 2}.get(name, 1)
    forward, backward, weights = (stages * rng.randint(0, 24) / 8 for _ in range(3))
    p = rng.randint(1, 9)
    m = rng.choice([rng.randint(1, 20), p * rng.randint(1, 3)])
    times = {"F": forward, "I": backward, "W": weights, "comm": rng.choice([0, rng.randint(0, 16) / 8])}
    return {"name": name, "p": p, "m": m, "v": v, **times}


def random_state(rng):
    return {
        "psi": rng.choice([rng.randint(1, 1000), rng.randint(1, 10**13)]),
        "d": rng.choice([rng.randint(1, 9), rng.randint(1, 65536)]),
        "stage": rng.randint(0, 3),
        "precision": rng.choice(list(WIDTHS)),
        "accumulating": rng.random() < 0.5,
    }


def random_layout(rng):
    """A layout, possible more often than not."""

    def seldom(unlikely, likely):
        return unlikely if rng.random() < 0.05 else likely

    heads, tp, pp = seldom(rng.randint(1, 99), rng.choice([24, 48, 96])), rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 8)
    length = rng.choice([16, 1000, 2048, 8192])
    experts = rng.choice([0, 0, 8])
    biases = experts == 0 and rng.random() < 0.5
    return {
        "layers": seldom(rng.randint(1, 20), 2 * pp * rng.randint(1, 8) + rng.choice([0, 0, 1])),
        "h": seldom(rng.randint(1, 20000), heads * rng.randint(1, 200)),
        "heads": heads,
        "groups": seldom(rng.randint(1, 99), rng.choice([heads, 24, 8 if tp != 3 else 24])),
        "inner": rng.randint(1, 60000),
        "gated": rng.random() < 0.5,
        "tied": rng.random() < 0.5,
        "biases": biases,
        "normBiases": rng.random() < 0.5,
        "experts": experts,
        "topK": rng.randint(1, 8) if experts else 1,
        "vocab": rng.randint(2, 300000),
        "positions": rng.choice([0, length, 2 * length]),
        "T": length,
        "dp": rng.choice([1, 2, 3, 8, 64, 1000]),
        "tp": tp,
        "pp": pp,
        "cp": rng.choice([1, 1, 2, 4]),
        "context": rng.choice(["ring", "all-gather", "ulysses"]),
        "ep": seldom(2, rng.choice([1, 2, 4, 8]) if experts else 1),
        "schedule": rng.choice(PLANNED) if pp > 1 else "1f1b",
        "v": rng.randint(1, 4),
        "b": rng.choice([1, 2, 4, 7]),
        "m": seldom(rng.randint(1, 7), pp * rng.choice([1, 2, 8])),
        "sequenceParallel": seldom(True, tp > 1 and rng.random() < 0.5),
        "zero": rng.randint(0, 3),
        "recompute": rng.choice(["none", "selective", "full"]),
        "attention": rng.choice(["stored", "flash"]),
        "precision": rng.choice(list(WIDTHS)[:2]),
    }


# ---- Python's answers ------------------------------------------------------------------------------------------------


def schedule_answer(name, p, m, v, F, I, W, comm):  # noqa: E741
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    stages = schedule.stages // p
    timeline = simulate(schedule, Durations(F / stages, I / stages, W / stages, comm))
    return {
        "slots": [[[str(slot.action), slot.start, slot.end] for slot in row] for row in timeline.ranks],
        "total": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        "peaks": timeline.peak_activations,
        "live": [[list(step) for step in live_activations(row)] for row in timeline.ranks],
    }


def state_answer(psi, d, stage, precision, accumulating):
    state = model_state(psi, Fraction(psi, d), stage, WIDTHS[precision], accumulating)
    return {kind: Fraction(getattr(state, kind)) for kind in ("parameters", "gradients", "optimizer")}


SHAPE = {
    "layers": "layers",
    "hidden": "h",
    "heads": "heads",
    "kv_heads": "groups",
    "vocab_size": "vocab",
    "positions": "positions",
    "ffn": "inner",
    "gated": "gated",
    "tied": "tied",
    "biases": "biases",
    "norm_biases": "normBiases",
    "top_k": "topK",
}
CHOICES = ("dp", "tp", "pp", "cp", "ep", "schedule", "zero", "recompute", "attention")


def layout_answer(**setting):
    """UsageError where the search of the planner would not look: see `layouts` in minipar/plan/search.py."""
    sizes = {field: setting[name] for field, name in SHAPE.items()}
    model = ModelShape(**sizes, experts=setting["experts"] or None)
    pp, m, name = setting["pp"], setting["m"], setting["schedule"]
    stages = setting["v"] if name == "interleaved-1f1b" and pp > 1 else 1
    layout = Layout(
        microbatch=setting["b"],
        microbatches=m,
        virtual_stages=stages,
        sequence_parallel=setting["sequenceParallel"],
        precision=WIDTHS[setting["precision"]],
        context_parallel=setting["context"] if setting["cp"] > 1 else "ring",
        **{choice: setting[choice] for choice in CHOICES},
    )
    length = setting["T"]
    check_layout(model, layout, layout.gpus, layout.dp * layout.microbatch * m, length)
    enough = {"interleaved-1f1b": m % pp == 0 and pp * stages <= model.layers, "zbv": model.layers % (2 * pp) == 0}
    fits = enough.get(name, (name, 1) in schedules(model, pp, m, name if pp > 1 else None))
    if (layout.sequence_parallel and layout.tp == 1) or not (fits or pp == 1):
        raise UsageError("no such layout")
    sent, held = volume(model, layout, length), memory(model, layout, length)
    pipeline = simulate(make(name, pp, m, stages if name == "interleaved-1f1b" else None)) if pp > 1 else None
    return {
        "parameters": model.parameters,
        "sent": {axis: getattr(sent, axis) for axis in ("tp", "pp", "dp", "cp", "ep")},
        "held": {kind: getattr(held, kind) for kind in ("parameters", "gradients", "optimizer")}
        | {"activations": held.activations, "buffers": held.buffers},
        "bubble": float(pipeline.bubble_fraction) if pipeline else 0,
    }


KINDS = {
    "schedule": (random_schedule, schedule_answer),
    "state": (random_state, state_answer),
    "layout": (random_layout, layout_answer),
}


def python_answer(kind, setting):
    try:
        return KINDS[kind][1](**setting)
    except UsageError:
        return "impossible"


# ---- the comparison --------------------------------------------------------------------------------------------------


def settings(kind):
    rng = random.Random(f"explorers {kind}")
    return [KINDS[kind][0](rng) for _ in range(SETTINGS)]


@pytest.fixture(scope="module")
def page():
    """Return what node makes of all settings: {"answers": {kind: [...]}, "COLOURS": {...}, ...}."""
    questions = [[kind, setting] for kind in KINDS for setting in settings(kind)]
    script = str(Path(__file__).with_name("explorers.mjs"))
    result = subprocess.run([NODE, script], input=json.dumps(questions), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    answers = found["answers"]
    found["answers"] = {kind: answers[i * SETTINGS : (i + 1) * SETTINGS] for i, kind in enumerate(KINDS)}
    return found


def as_python(kind, answer):
    """An answer of JavaScript in Python's terms: fractions came as pairs of strings."""
    if "error" in answer:
        return "impossible" if answer["error"] else "no reason given"
    if kind == "schedule":
        return answer
    fractions = {name: Fraction(*map(int, pair)) for name, pair in answer.get("sent", answer).items()}
    return answer | {"sent": fractions} if kind == "layout" else fractions


@pytest.mark.parametrize("kind", KINDS)
def test_explorers_compute_what_python_computes(page, kind):
    answers = [as_python(kind, answer) for answer in page["answers"][kind]]
    for setting, answer in zip(settings(kind), answers, strict=True):
        closed = answer.pop("closed", None) if isinstance(answer, dict) else None
        assert answer == python_answer(kind, setting), setting
        assert closed is None or closed == pytest.approx(answer["bubble"], rel=1e-12), setting
    assert sum(answer != "impossible" for answer in answers) > SETTINGS / 2


def test_explorers_refuse_what_cannot_be(page):
    assert {kind for kind, answers in page["answers"].items() for answer in answers if "error" in answer} == {
        "schedule",
        "layout",
    }


def test_explorers_have_the_names_and_sizes_of_the_library(page):
    assert page["SCHEDULES"] == list(SCHEDULES)
    assert page["PLANNED"] == PLANNED
    assert page["PRECISIONS"] == {name: vars(precision) for name, precision in WIDTHS.items()}
    for name, sizes in page["MODELS"].items():
        model = MODELS[name]
        shape = {field: getattr(model, field) for field in SHAPE} | {"kv_heads": model.groups, "ffn": model.inner}
        assert {field: sizes[key] for field, key in SHAPE.items()} == shape
        assert sizes["experts"] == (model.experts or 0)


def test_explorers_have_the_colours_of_the_pictures(page):
    axes = {axis: colour for axis, (colour, _) in LOOKS.items()}
    assert page["COLOURS"] == {name: (COLOURS | axes)[name] for name in page["COLOURS"]}


# ---- the start page's map --------------------------------------------------------------------------------------------

CELLS = """
import { DEVICES, cellOf, cubeCellOf, pairs } from "./docs/site/static/map.js";
const devices = Array.from({ length: DEVICES }, (_, device) => device);
const at = ({ column, row }) => [column, row];
for (const [links, cell] of [["ring", cellOf], ["line", cellOf], ["cube", cubeCellOf]])
  for (const columns of [2, 4])
    console.log(JSON.stringify([links, columns, devices.map((one) => at(cell(one, columns))), pairs(links)]));
"""


def test_no_arrow_of_a_ring_line_or_cube_passes_behind_a_device():
    """Devices that send to each other stand side by side, or at the ends of a row or column: that arrow goes around."""
    argv = [NODE, "--input-type=module", "--eval", CELLS]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for line in done.stdout.splitlines():
        links, columns, places, pairs = json.loads(line)
        assert sorted(places) == [[column, row] for column in range(columns) for row in range(8 // columns)]
        far = []
        for one, other in pairs:
            (x, y), (u, v) = places[one], places[other]
            if abs(x - u) + abs(y - v) > 1:
                far.append((abs(x - u), abs(y - v)))
        from_end_to_end = (0, 3) if columns == 2 else (3, 0)
        assert far == ([from_end_to_end] * 2 if links == "cube" else [])
