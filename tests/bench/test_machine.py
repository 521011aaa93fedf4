"""`bench machine` and `bench layouts` say what they promise to say, and constants are found in what they made."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest
from launcher import run_mpi
from minipar.bench.fit import fit
from minipar.bench.pieces import Shape

from minipar.autograd import metering
from minipar.bench import costs, layouts, machine, messages, pieces
from minipar.bench.costs import Costs, fit_costs, flops
from minipar.errors import UsageError
from minipar.train.config import ModelConfig

SMALL = "--hidden 32 --seq-len 8 --vocab-size 16 --repeat 1"


def bench(ranks, *arguments):
    result = run_mpi(ranks, ["-m", "minipar.bench", *arguments, "--json", "-"], timeout=90)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_fit_finds_the_constants_of_exact_measurements_over_many_orders_of_magnitude():
    features = np.array([[1.0, n] for n in (0, 1e3, 1e6, 1e9)])
    assert fit(features, features @ [2e-5, 3e-10]) == pytest.approx([2e-5, 3e-10], rel=1e-9)
    assert fit(features, features @ [2e-5, 3e-10] + 1e-6, [1e-6] * 4) == pytest.approx([2e-5, 3e-10], rel=1e-9)


def test_fit_gives_zero_where_least_squares_would_go_below_it():
    x = np.arange(1.0, 6.0)
    assert np.linalg.lstsq(np.stack([np.ones(5), x], axis=1) / x[:, None], (x - 0.5) / x, rcond=None)[0][0] < 0
    found = fit(np.stack([np.ones(5), x], axis=1), x - 0.5)
    assert found[0] == 0 and 0 < found[1] < 1


def test_the_cost_model_finds_the_constants_that_made_its_measurements():
    true = Costs(
        *np.linspace(1, 2, len(fields(Costs))) * [1e11 if f.name[0:5] == "flops" else 1e-9 for f in fields(Costs)]
    )
    shapes = [shape for shape, _ in machine.shapes(256, 64, 256)]
    measured = []
    for i, shape in enumerate(shapes):
        parameters = 1e6 * (1 + i)
        measured.append(
            (shape, {p: true.seconds(p, shape, parameters) for p in costs.PIECES} | {"parameters": parameters})
        )
    assert asdict(fit_costs(measured)) == pytest.approx(asdict(true), rel=1e-4)


@pytest.mark.parametrize("shape", [Shape(32, 4, 8, 3), Shape(32, 4, 8, 2, tp=2), Shape(32, 4, 8, 2, 4, True, 64)])
def test_the_cost_model_counts_the_operations_that_the_pieces_do(shape):
    """Counted by the meter of autograd while the piece runs: B = I + W."""
    counted = []
    with metering(counted.append):
        pieces.pieces(shape, repeat=1)
    rounds = pieces.WARMUP + 1
    block = 4 * flops("F", shape) + 4 * (flops("I", shape) + flops("W", shape))
    ends = flops("head F", shape) + flops("head B", shape)
    assert sum(counted) == rounds * (pieces.BLOCKS * block + ends)


def test_what_tensor_and_sequence_parallelism_cut():
    """Products, logits and matrices; with sequence parallelism the head's input and all that a block keeps. What is to
    be summed is copied whole, if there is anybody to sum with.
    """
    one, cut, sliced = (Shape(32, 4, 8, 2, tp, sequence, 64) for tp, sequence in ((1, False), (4, False), (4, True)))

    def counts(piece, shape):
        return costs.PIECES[piece](shape, 0.0)

    hidden, logits = 2 * 8 * 32.0, 2 * 8 * 64.0
    assert [counts("F", shape)["copy_hidden"] for shape in (one, cut, sliced)] == [0, hidden, hidden]
    assert [counts("head F", shape)["head_forward_hidden"] for shape in (one, cut, sliced)] == [
        hidden,
        hidden,
        hidden / 4,
    ]
    assert [counts("head B", shape)["head_backward_logit"] for shape in (one, cut, sliced)] == [
        logits,
        *[logits / 4] * 2,
    ]
    assert [counts("I", shape)["read_parameter"] for shape in (one, cut)] == [12 * 32**2, 3 * 32**2]
    assert [costs.kept(one) / costs.kept(shape) for shape in (one, sliced)] == [1, 4]
    assert costs.kept(one) / 4 < costs.kept(cut) < costs.kept(one)


# ---- the subcommands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_machine_gives_constants_pieces_and_messages(ranks):
    rows = bench(ranks, "machine", *SMALL.split())
    constants = {row["name"]: row["value"] for row in rows if row["row"] == "constant"}
    links = {"message_alpha", "message_beta"} if ranks > 1 else set()  # nobody to talk to
    assert set(constants) == {field.name for field in fields(Costs)} | links
    assert constants["flops_per_second"] > 0 and min(constants.values()) >= 0
    found = [row for row in rows if row["row"] == "piece"]
    shapes = machine.shapes(32, 8, 16)
    assert len(found) == len(shapes) * (len(costs.PIECES) + 2)  # B and "B more" are predicted as sums
    assert {row["fitted"] for row in found} == {True, False}
    for row in found:
        assert row["seconds"] > 0 and row["ratio"] == pytest.approx(row["predicted"] / row["seconds"])
    assert [row["bytes"] for row in rows if row["row"] == "message"] == (list(messages.SIZES) if ranks > 1 else [])


def test_layouts_gives_time_and_memory_of_each_layout_that_the_ranks_are_enough_for():
    flags = "layouts --layers 8 --hidden 16 --heads 4 --seq-len 8 --vocab-size 16 --global-batch 32 --repeat 2"
    rows = bench(4, *flags.split())
    assert len(rows) == len(layouts.configs(ModelConfig(8, 16, 4, 8, 16), 32, 4)) > 15
    assert {row["ranks"] for row in rows} == {1, 2, 4}
    for row in rows:
        assert row["dp"] * row["tp"] * row["pp"] == row["ranks"] == len(row["ranks_peak_bytes"])
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert 0 < min(row["ranks_peak_bytes"]) and max(row["ranks_peak_bytes"]) == row["peak_bytes"]
        assert (row["schedule"] is None) == (row["pp"] == 1)
    one, dp4, zero3 = (
        next(row for row in rows if (row["dp"], row["zero_stage"], row["ranks"]) == key)
        for key in ((1, 0, 1), (4, 1, 4), (4, 3, 4))
    )
    assert one["peak_bytes"] > dp4["peak_bytes"] > zero3["peak_bytes"]


def test_layouts_prices_messages_with_the_network():
    """Two steps with the same messages: a second for each is seen on the clock, not waited for."""
    flags = "layouts --layers 2 --hidden 16 --heads 4 --seq-len 8 --vocab-size 16 --global-batch 8 --repeat 1"
    rows = bench(2, *flags.split(), "--network", "1", "0")
    assert all((row["seconds"] > 1) == (row["ranks"] > 1) for row in rows)


def test_there_are_at_least_20_layouts_that_use_every_kind_of_parallelism():
    found = layouts.configs(ModelConfig(8, 256, 8, 64, 256), 32, 8)
    assert 20 <= len(found) == len(set(found))
    assert {layouts.ranks_of(config) for config in found} == {1, 2, 4, 8}
    assert {config.mesh.zero_stage for config in found} == {0, 1, 2, 3}
    assert {config.data.global_batch for config in found} == {32}
    for axis in ("dp", "tp", "pp"):
        assert {getattr(config.mesh, axis) for config in found} == {1, 2, 4, 8}
    schedules = {config.mesh.schedule for config in found if config.mesh.pp > 1}
    assert {"naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1"} <= schedules


def test_a_model_that_a_layout_cannot_cut_is_refused():
    with pytest.raises(UsageError, match="heads/tp = 4/8"):
        layouts.configs(ModelConfig(8, 16, 4, 8, 16), 32, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        ["machine", "--hidden", "12"],
        ["machine", "--seq-len", "6"],
        ["machine", "--repeat", "0"],
        ["layouts", "--repeat", "0"],
        ["layouts", "--network", "-1", "0"],
        ["layouts", "--global-batch", "3"],
        ["layouts", "--hidden", "65"],
        ["layouts", "--layers", "1"],
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments):
    result = run_mpi(2, ["-m", "minipar.bench", *arguments], timeout=30)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("minipar: error:")
    assert f"{arguments[1].strip('-')} {arguments[2]}" in result.stderr, "it names what is wrong"
