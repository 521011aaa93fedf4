"""Each figure of the chapters is drawn from small data without a warning, and animated sums end where they should."""

import importlib
import inspect
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from picture_cases import chrome, timeline

from chapters.support import animate, animate_schedules, overview, schedule_paths
from chapters.support.ch00 import figures as ch00
from chapters.support.ch01 import figures as ch01
from chapters.support.ch02 import figures as ch02
from chapters.support.ch03 import figures as ch03
from chapters.support.ch04 import figures as ch04
from chapters.support.ch05 import animate_units
from chapters.support.ch05 import figures as ch05
from chapters.support.ch06 import figures as ch06
from chapters.support.ch07 import figures as ch07
from chapters.support.ch08 import figures as ch08
from chapters.support.ch09 import layout_figures as ch09
from chapters.support.ch10 import figures as ch10
from chapters.support.ch11 import animate_ring
from chapters.support.ch11 import figures as ch11
from chapters.support.ch12 import figures as ch12
from chapters.support.ch13 import figures as ch13
from chapters.support.ch14 import figures as ch14
from chapters.support.muon import figures as muon_figures
from minipar.comm import messages, wire_bytes
from minipar.parallel.pipeline.actions import Durations
from minipar.plan.layout import Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import memory
from minipar.plan.step_time import StepTime
from visualize.plan import MEMORY, TIME

SUPPORT = Path(ch00.__file__).parents[1]


@dataclass(eq=False)
class Result:
    """A tensor after backward, as chapter 1's engine leaves it."""

    number: int
    data: float
    grad: float
    inputs: tuple = ()
    rules: tuple = ()


def small_graph():
    x, w = Result(0, 2.0, 48.0), Result(1, 3.0, 28.0)
    a = Result(2, 6.0, 14.0, (x, w), (lambda g: g * 3, lambda g: g * 2))
    return {"a": a, "x": x, "w": w}


def slots(name, p, m, **durations):
    """Return start and end of each action of a simulated schedule, by kind, microbatch and stage."""
    found = {}
    for row in timeline(name, p, m, **durations).ranks:
        for slot in row:
            found[slot.action.kind, slot.action.microbatch, slot.action.stage] = slot.start, slot.end
    return found


def funnel():
    layouts = [Layout(dp=d, tp=1, pp=1, microbatch=1, microbatches=1) for d in range(1, 8)]
    times = {one: StepTime(one.dp, 0, 0, 0, 0, 0, exact=False) for one in layouts}
    return [*layouts, *layouts], layouts, layouts[:4], layouts[:3], times


def two_steps():
    trace = chrome(ranks=8, steps=2)
    trace["otherData"]["mesh"] = {"pp": 2, "dp": 2, "tp": 2}
    return trace


LIFE = [("c", 2, 0), ("b", 1, 1), ("a", 1, 1)]
BUCKETS = [
    {"bucket_bytes": 4096, "seconds": 0.003, "buckets": 1},
    {"bucket_bytes": 1024, "seconds": 0.002, "buckets": 4},
]
BLOCKS = [("at first", np.array([[1, 1], [2, 2]])), ("step 1", np.array([[3, 1], [2, 3]]))]
TIMES = {("ring", 1024): 0.002, ("ring", 4096): 0.003}
PATH = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1), ("B", 1, 0)]
PIECES = [("down", 1), ("the last rank", 6), ("up", 2)]
FILES = {
    0: {"part": 0, "parts": 2, "start": 0, "stop": 3},
    1: {"part": 1, "parts": 2, "start": 0, "stop": 6},
    2: {"part": 0, "parts": 2, "start": 3, "stop": 6},
}
PARTS = dict.fromkeys(MEMORY, 0.0) | {"parameters": 10e9, "activations": 50e9}
SECONDS = dict.fromkeys(TIME, 0.0) | {"compute": 3.0, "bubble": 1.0}
HELD = memory(find_model("gpt2"), Layout(dp=1, tp=1, pp=1, microbatch=1, microbatches=1), 1024)
AXES = {1: {"compute": 4.0, "tp": 0.0, "dp": 1.0}, 2: {"compute": 4.0, "tp": 0.5, "dp": 0.5}}
EFFECTS = {
    "links": {"-20 %": (0.01, False), "+20 %": (-0.01, False)},
    "products": {"-20 %": (0.2, True), "+20 %": (-0.1, False)},
}
RIGHT_AND_WRONG = {"right": {"losses": [3, 2], "norms": [1, 1]}, "wrong": {"losses": [3, 1], "norms": [1, 2]}}
SIX = {"A": {"right": [[2, 1], [3, 4]], "run": [[2, 1.5], [5, 6]]}, "B": {"right": [[9, 1]], "run": [[9, 1]]}}
FOUND = {"float32": {"single": {"losses": [3.0, 2.0]}, "tp2": {"losses": [3.0, 2.5]}}}
GRADIENTS = {"single": {"gradients": [1e-7, 1e-6]}, "a": {"gradients": [2e-7, 2e-6]}, "b": {"gradients": [3e-7, 1e-6]}}
DRIFT = {"float32": GRADIENTS}

# Each figure's function, and the arguments of a call.
FIGURES = [
    (overview.draw_strategies, ["dp"]),
    (
        schedule_paths.plot_paths,
        {"1F1B": schedule_paths.MarkedPath(slots("1f1b", 2, 2), PATH, PIECES, [1, 0])},
        "F = 1",
    ),
    (animate_schedules.plot_states,),
    (animate_units.still, animate_units.record()),
    (animate_ring.still, animate_ring.record(ranks=3)),
    (ch00.draw_four_strategies,),
    (ch01.plot_backward, small_graph()),
    (ch01.plot_small_graph,),
    (ch01.plot_steps, [1e-8, 1e-6, 1e-4], [1e-8, 1e-10, 1e-8]),
    (ch01.plot_three_paths, {"directly": [1.0, 2.0], "through rho": [0.5, -1.0], "through the mean": [-1.0, -1.0]}),
    (ch02.plot_block, ch02.block_operations(B=2, T=3, h=8, a=4), [(0, 4), (5, 9)]),
    (ch02.plot_attention, np.array([[1.0, 0.0], [0.25, 0.75]]), np.array([[0.0, 0.0], [-0.5, 0.5]])),
    (ch02.plot_shares, {"parameters": {"wte": 1, "blocks": 3}, "flops": {"blocks": 10}}),
    (ch02.plot_memory, {"plain": [("start", 0, 0), ("loss", 2**22, 2**23), ("end", 2**20, 2**23)]}, "loss"),
    (ch03.draw_collectives, {"a": (np.diag([1, 8]), np.array([[5, 10], [0, 0]])), "b": (np.eye(2, dtype=int),) * 2}),
    (ch03.plot_blocks, [BLOCKS, BLOCKS]),
    (ch03.draw_tree, 3),
    (ch03.plot_orders, {"ring": 3, "recursive_doubling": 0}, 7),
    (ch03.plot_crossover, TIMES, {"ring": lambda n: n * 1e-6}, {"tree overtakes ring": 2000.0}),
    (ch04.draw_life_of_buckets, LIFE, [3, 2]),
    (ch04.plot_bucket_sizes, BUCKETS, 0.004, 0.001),
    (ch04.plot_differing, [3, 0]),
    (ch04.plot_departures, [(1, 100), (3, 50)]),
    (ch04.plot_weights, [3, 5]),
    (ch04.plot_scaling, {8: (0.5, 0.9), 64: (0.2, 0.7)}),
    (ch04.plot_losses, {"a": [3.0, 2.0]}),
    (ch04.plot_local_steps, {"a": [3, 2], "b": [4, 1]}, {"H = 1": 2048, "H = 2": 1024}),
    (ch05.draw_model_state, (2, 2, 12), 4),
    (ch05.draw_gather_and_free, ch05.gather_and_free(3, 2, 4, 1)),
    (ch05.draw_two_orders, 4),
    (ch05.draw_identities,),
    (ch05.plot_step_times, {"slow": {"one": 0.2, "two": 0.3}, "fast": {"one": 0.1, "two": 0.1}}, 0.1),
    (ch05.plot_microbatches, {"once": (2, 0), "every": (0, 2)}, {"once": (4, 2.0)}),
    (ch05.draw_shards_and_replicas, 2, 4),
    (ch06.plot_cuts, [("qkv", 4, 12, 1, 3), ("proj", 4, 4, 0, 1)], 2),
    (ch06.plot_blocks, False, True),
    (ch06.draw_groups, 8, 4, (4, 8)),
    (ch06.draw_split_loss, 4, 9, 3),
    (ch06.plot_kept, {"a": (1e6, 2e6, 4e6)}, ("x", "y", "z")),
    (ch06.plot_links, {"fast": (2.0, 1.0)}, {"fast": ([1, 2], [5.0, 3.0])}, 5.0),
    (ch06.draw_caught, {"one": {"b"}, "two": set()}, ("a", "b")),
    (ch07.draw_crossing, (["0F0", "0SEND_F0", "0RECV_B0"], ["1RECV_F0", "1B0", "1SEND_B0"]), (1, 2)),
    (ch08.picture_of, "interleaved-1f1b", 2, 4, 3, Durations(4, 5, 3)),
    (ch08.plot_warm_up, slots("interleaved-1f1b", 4, 8, forward=1, backward_input=1, backward_weight=0), 4, 1, 8, 14),
    (ch08.plot_overlap, 4, 16, 4),
    (ch08.plot_memory_and_bubble, {"a": (4, 0.25), "b": (7, 0.1)}),
    (ch08.plot_operations, [1, 2], {"F": [2, 3], "W": [2, 2]}),
    (ch08.draw_versions, slots("1f1b", 2, 2), {"a rule": lambda stage, microbatch: microbatch + stage}, 3),
    (ch08.explore_schedules,),
    (ch09.plot_machine, {"a": (PARTS, None), "b": (PARTS, 1.5)}, 80e9, 0.92, 130e9),
    (ch09.plot_held, [3, 3], [1, 1], [2, 2], ["rank 0", "rank 1"]),
    (ch09.plot_noticed, {"a mistake": {"loss"}}, ("loss", "ranks")),
    (ch09.plot_grid, {"pp": 2, "dp": 2, "tp": 4}, 8),
    (ch09.plot_pieces, FILES, (3, 4)),
    (ch09.plot_layouts, {"dp 2": ([5.0, 4.0], [1e-15, 2e-15])}, [5.0, 4.0], [1e-12, 6e-12]),
    (ch09.plot_placements, 0.1, {("tp", "Ethernet"): 0.2, ("pp", "Ethernet"): 0.11}),
    (ch09.plot_two_steps, two_steps(), ("pp", "tp")),
    (muon_figures.plot_spectra, [3, 4], [1.0, 0.7], [2.0, 0.1]),
    (muon_figures.plot_owners, [1024, 4096], [2048, 2048], [0, 2]),
    (ch10.draw_funnel, *funnel()),
    (ch10.plot_funnel, {"all": 40, "fit": 10}, {"dp 8": SECONDS, "tp 8": SECONDS | {"tp": 6.0}}),
    (ch10.plot_memory, {"one": {"small": HELD}}, 80e9, 200e9),
    (ch10.plot_mistakes, {"one_mistake": {"claimed": PARTS, "really": PARTS}}, 80e9, 200e9),
    (ch10.plot_fit, {"one": {"small": PARTS, "large": PARTS | {"activations": 300e9}}}, 80e9, 200e9),
    (ch10.plot_wires, {"a": ("tp", AXES), "b": ("dp", AXES)}),
    (ch10.plot_bubbles, {"a": ("m", {"1f1b": {8: 0.4, 16: 0.3}, "zb-h1": {8: 0.2}})}),
    (ch10.plot_families, {"ZeRO-3": {64: 30.0, 256: 4.0}, "tp 8": {64: 10.0, 256: 5.0, 1024: 2.0}}),
    (ch10.plot_scaling, {"A100": {"7B": {64: (100.0, 0.5), 256: (300.0, 0.375)}}}),
    (ch10.plot_spending, {"7B": {"dp 8": (SECONDS, 0.4)}, "70B": {"tp 8": (SECONDS, 0.5)}}),
    (ch10.plot_points, {"ms": [(10.0, 12.0), (500.0, 300.0)], "MB": [(3.0, 3.0)]}, 0.2),
    (ch10.plot_tornado, {"one": EFFECTS, "two": EFFECTS}),
    (ch10.plot_decisions,),
    (ch11.plot_mask, 5),
    (ch11.plot_costs, (2, 4), {"one": [(2**20, 0.5), (2**22, 1)], "two": [(2**21, 0.25), (2**21, 2)]}),
    (ch11.plot_ring, 3),
    (ch11.plot_balance, {"contiguous": [(0, 1), (2, 3)]}, {"contiguous": np.array([[3, 3], [0, 4]])}),
    (ch11.plot_ulysses, 3),
    (ch11.plot_crossover, [1, 8], range(2, 5), lambda c, group: {"ring": c, "all-gather": group, "ulysses": c * group}),
    (ch11.plot_running, [[1.0, 1.0, 3.0], [2.0, 2.0, 4.0]], 2.0, 2.5),
    (ch11.plot_losses, {"right": [3.0, 2.0], "wrong": [3.0, 4.0]}),
    (ch11.plot_attention_share, np.array([12, 24]), (1, 2), 1),
    (ch12.plot_choice, np.array([0.0, 1.0]), np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([0.0, 0.3]), 1),
    (ch12.plot_dispatch, [np.array([[3, 0], [1, 2]]), np.array([[2, 0]])], 4),
    (ch12.plot_ep_or_dp, [10, 20], {"ep": [1, 2], "dp": [3, 3], "zero": [4, 4]}, [15.0]),
    (ch12.plot_mistakes, RIGHT_AND_WRONG),
    (ch12.plot_balance, {"one": np.array([[6, 2], [8, 0], [8, 0], [6, 2]]), "two": np.full((4, 2), 3)}),
    (ch12.plot_exchange, {"without": [30, 10], "aux": [20, 22]}, 21.0),
    (ch12.draw_sums, 4, 2),
    (ch12.plot_capacity, np.array([1, 4]), 3, [1.0, 2.0], {run: [10.0, 0.0] for run in "abc"}),
    (ch13.plot_bits, {"wide": (3, 4), "narrow": (2, 1)}),
    (ch13.plot_weight, {"exact": [1, 1.5], "rounded": [1, 1]}, 0.125, 0.25),
    (ch13.plot_scales, np.array([-20.5, -3.0, -1.0]), 16, {"a": [1, 2], "b": [3, 4]}, [0, 2]),
    (ch13.plot_ring_error, [2, 4, 8], {"long": [1, 2, 3], "short": [1, 2]}, [4, 5, 6]),
    (ch13.plot_standing_still, {"exact": [1, 0.5, 0], "bf16": [1, 1]}, {"good": [1, 0.1], "bad": [1, 2]}, 1.0),
    (ch13.plot_losses, {"a": [4, 2, 2, 0], "b": [1, 1, 1, 1]}, 2),
    (ch13.plot_roundoff, np.array([0, 1]), {"a": np.array([0.5, np.nan])}, {"a": 1.5}),
    (ch14.plot_drift, {"1e-3": DRIFT, "3e-3": DRIFT}, [1, 2], {"float32": [1e-6, 1e-5]}),
    (ch14.plot_six, SIX, 0, "loss"),
    (ch14.plot_sums, [10, 100], {"float32": [1e-7, 2e-7]}, {"float32": 2**-24}),
    (ch14.plot_eighteen, FOUND, {"single": (4, 3, 2), "tp2": (4, 3, 1)}, (1, 2, 3)),
    (ch14.plot_judge, {"A": (3.0, 3.0), "C": (1.0, 2e-9)}, 2.0**29),
    (ch14.draw_checks,),
]


def name_of(function):
    return f"{function.__module__.removeprefix('chapters.support.')}.{function.__name__}"


@pytest.mark.parametrize("call", FIGURES, ids=lambda call: name_of(call[0]))
def test_a_figure_is_drawn_without_a_warning(call):
    function, *arguments = call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*arguments).savefig(io.BytesIO(), format="png", dpi=50)


def figures_of(path):
    """List the public functions of a file that return a picture."""
    module = importlib.import_module(".".join(path.relative_to(SUPPORT.parents[1]).with_suffix("").parts))
    functions = [value for _, value in inspect.getmembers(module, inspect.isfunction)]
    own = [value for value in functions if value.__module__ == module.__name__ and value.__name__[0] != "_"]
    return [name_of(value) for value in own if "Picture" in str(value.__annotations__.get("return"))]


def test_every_figure_of_a_chapter_is_in_the_table():
    paths = [*SUPPORT.glob("*/*figures.py"), Path(overview.__file__), Path(schedule_paths.__file__)]
    there = {name for path in paths for name in figures_of(path)}
    assert there <= {name_of(function) for function, *_ in FIGURES}


@pytest.mark.parametrize(("op", "algorithm"), [case[:2] for case in animate.GALLERY.values()])
def test_animated_messages_are_the_closed_forms(op, algorithm):
    for ranks in (2, 4, 8):
        log = animate.record(op, algorithm, ranks)
        for rank in range(ranks):
            own = [message for message in log if message.source == rank]
            assert len(own) == messages(op, algorithm, ranks, rank)
            assert sum(len(message.chunks) for message in own) == wire_bytes(op, algorithm, ranks, 1, ranks, rank)
        last = animate.states(log, ranks)[-1]
        everyone = (1 << ranks) - 1
        assert [last[rank][rank] for rank in range(ranks)] == [everyone] * ranks


def test_gpipe_and_1f1b_hold_other_numbers():
    before, after = animate_schedules.states_of_chapter_7()
    assert before.idle == after.idle and (before.alive, after.alive) == ((7, 7, 7, 7), (4, 3, 2, 1))
    assert before.times.keys() == after.times.keys()


def test_a_pipelines_devices_hold_less_and_less():
    (row,) = (row for row in overview.ROWS if row.key == "pp")
    axes = overview.draw_strategies().axes[0]
    yellow = [box for box in axes.patches if to_hex(box.get_facecolor()).upper() == overview.KIND_COLOURS[3]]
    place = overview.ROWS.index(row)
    heights = [box.get_height() for box in yellow if place < box.get_y() < place + 1]
    assert row.has[3] == overview.FALLING and np.allclose(heights, [0.68 * (8 - device) / 8 for device in range(8)])
