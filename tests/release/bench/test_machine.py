"""The fit of `bench machine` finds the constants that made the times, and its cost model counts what the pieces do."""

from dataclasses import asdict

import numpy as np
import pytest

from minipar.autograd import flop_counter
from minipar.bench import layouts, machine
from minipar.bench.costs import BLOCKS, PIECES, Shape, amounts_of, compute_time, fit, fit_costs, predicted
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape

CONSTANTS = list(dict.fromkeys(constant for piece in PIECES.values() for constant in piece))


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_fit_finds_constants_over_many_orders_of_magnitude():
    features = np.array([[1.0, n] for n in (0, 1e3, 1e6, 1e9)])
    assert fit(features, features @ [2e-5, 3e-10]) == pytest.approx([2e-5, 3e-10], rel=1e-9)


def test_fit_gives_zero_where_least_squares_would_go_below_it():
    x = np.arange(1.0, 6.0)
    assert np.linalg.lstsq(np.stack([np.ones(5), x], axis=1) / x[:, None], (x - 0.5) / x, rcond=None)[0][0] < 0
    constants = fit(np.stack([np.ones(5), x], axis=1), x - 0.5)
    assert constants[0] == 0 and 0 < constants[1] < 1


def test_the_fit_finds_the_constants_that_made_the_times():
    units = [1e-11 if name == "seconds_per_flop" else 1e-9 for name in CONSTANTS]
    true = dict(zip(CONSTANTS, np.linspace(1, 2, len(CONSTANTS)) * units, strict=True))
    measured = []
    for i, shape in enumerate(machine.shapes(256, 64)):
        times = {piece: predicted(true, piece, shape, 1e6 * (1 + i)) for piece in PIECES}
        measured.append((shape, times | {"parameters": 1e6 * (1 + i)}))
    assert fit_costs(measured) == pytest.approx(true, rel=1e-4)


@pytest.mark.parametrize("shape", [Shape(32, 4, 8, 3), Shape(32, 4, 8, 2, tp=2), Shape(32, 4, 8, 2, 4, True, 64)])
def test_the_cost_model_counts_the_operations_of_the_pieces(shape):
    """Counted by the meter of autograd while the pieces run."""
    counted = []
    with flop_counter(counted.append):
        machine.pieces(shape, repeat=1)
    amounts = amounts_of(shape, 0.0)
    block = 2 * sum(amounts[name] for name in ("forward", "input", "weight"))
    ends = amounts["head"] + amounts["head_backward"]
    assert sum(counted) == (machine.WARMUP + 1) * (BLOCKS * block + ends)


def test_amounts_that_tensor_and_sequence_parallelism_divide():
    """Products, logits and matrices; with sequence parallelism the head's input and all that a block keeps. What is to
    be summed is copied whole, if there is anybody to sum with.
    """
    shapes = (Shape(32, 4, 8, 2, tp, sequence, 64) for tp, sequence in ((1, False), (4, False), (4, True)))
    one, split, sliced = every = [amounts_of(shape, 0.0) for shape in shapes]
    hidden, logits = 2 * 8 * 32.0, 2 * 8 * 64.0
    assert [amounts["copied"] for amounts in every] == [0, hidden, hidden]
    assert [amounts["head_hidden"] for amounts in every] == [hidden, hidden, hidden / 4]
    assert [amounts["logits"] for amounts in every] == [logits, logits / 4, logits / 4]
    assert [amounts["matrices"] for amounts in (one, split)] == [12 * 32**2, 3 * 32**2]
    assert one["kept"] == 4 * sliced["kept"] and one["kept"] / 4 < split["kept"] < one["kept"]


COSTS = {name: 1e-9 * (1 + i) for i, name in enumerate(CONSTANTS)}


@pytest.mark.parametrize(("recompute", "sequence"), [("none", False), ("full", True)])
def test_the_planner_gets_the_pieces_of_a_layouts_shape(recompute, sequence):
    """Of 4 microbatches one writes the weights' gradients, and 3 add to them; of 5 layers a rank of 2 has 3."""
    layout = Layout(dp=1, tp=2, pp=2, microbatch=3, microbatches=4, recompute=recompute, sequence_parallel=sequence)
    found = compute_time(COSTS, ModelShape(5, 32, 4, 64, positions=8), layout, 8, 1000.0)
    shape = Shape(32, 4, 8, 3, 2, sequence, 64)
    time = {piece: predicted(COSTS, piece, shape, 1000.0) for piece in PIECES}
    products = 2 * 3 * 8 * 32 * 64 / 2 / 1e9  # of the head's weight gradient on one of two ranks
    tensors = 3 * 12 + 4
    assert asdict(found) == pytest.approx(
        {
            "forward": time["F"],
            "backward_input": time["I"],
            "backward_weight": (time["W"] + 3 * time["W more"]) / 4,
            "recompute": time["F"] if recompute == "full" else 0.0,
            "head_forward": time["head F"],
            "head_backward_input": time["head B"] - products,
            "head_backward_weight": products,
            "embedding_forward": time["embed F"],
            "embedding_backward": time["embed B"],
            "update": 1000 * (COSTS["norm_parameter"] + COSTS["update_parameter"])
            + tensors * (COSTS["norm_tensor"] + COSTS["update_tensor"]),
        },
        rel=1e-12,
    )


def test_the_layouts_use_every_kind_of_parallelism():
    runs = layouts.runs_of("--layers 8 --hidden 256 --heads 8 --global-batch 32", 8)
    assert 20 <= len(runs) == len({str(args) for args in runs})
    assert {layouts.layout_of(args).gpus for args in runs} == {1, 2, 4, 8}
    assert {args.zero_stage for args in runs} == {0, 1, 2, 3}
    assert {args.global_batch for args in runs} == {32}
    for axis in ("dp", "tp", "pp"):
        assert {getattr(args, axis) for args in runs} == {1, 2, 4, 8}
    schedules = {args.schedule for args in runs if args.pp > 1}
    assert {"naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1"} <= schedules
