"""`bench machine` and `bench layouts`: their rows, and constants that the fit finds in what was made with them."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest
from launcher import run_mpi

from minipar.autograd import flop_counter
from minipar.bench import layouts, machine
from minipar.bench.costs import BLOCKS, PIECES, SUMS, Costs, Shape, amounts_of, fit, fit_costs, flops
from minipar.errors import UsageError
from minipar.plan.layout import Layout
from minipar.plan.model import ModelShape
from minipar.train.settings import ModelConfig

SMALL = "--hidden 32 --seq-len 8 --vocab-size 16 --repeat 1"


def bench(ranks, *arguments):
    result = run_mpi(ranks, ["-m", "minipar.bench", *arguments, "--json", "-"], timeout=90)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def test_fit_finds_constants_over_many_orders_of_magnitude():
    features = np.array([[1.0, n] for n in (0, 1e3, 1e6, 1e9)])
    assert fit(features, features @ [2e-5, 3e-10]) == pytest.approx([2e-5, 3e-10], rel=1e-9)
    assert fit(features, features @ [2e-5, 3e-10] + 1e-6, [1e-6] * 4) == pytest.approx([2e-5, 3e-10], rel=1e-9)


def test_fit_gives_zero_where_least_squares_would_go_below_it():
    x = np.arange(1.0, 6.0)
    assert np.linalg.lstsq(np.stack([np.ones(5), x], axis=1) / x[:, None], (x - 0.5) / x, rcond=None)[0][0] < 0
    constants = fit(np.stack([np.ones(5), x], axis=1), x - 0.5)
    assert constants[0] == 0 and 0 < constants[1] < 1


def test_the_fit_finds_the_constants_that_made_the_times():
    names = [field.name for field in fields(Costs)]
    units = [1e11 if name == "flops_per_second" else 1e-9 for name in names]
    true = Costs(**dict(zip(names, np.linspace(1, 2, len(names)) * units, strict=True)))
    measured = []
    for i, (shape, _) in enumerate(machine.shapes(256, 64, 256)):
        times = {piece: true.seconds(piece, shape, 1e6 * (1 + i)) for piece in PIECES}
        measured.append((shape, times | {"parameters": 1e6 * (1 + i)}))
    assert asdict(fit_costs(measured)) == pytest.approx(asdict(true), rel=1e-4)


@pytest.mark.parametrize("shape", [Shape(32, 4, 8, 3), Shape(32, 4, 8, 2, tp=2), Shape(32, 4, 8, 2, 4, True, 64)])
def test_the_cost_model_counts_the_operations_of_the_pieces(shape):
    """Counted by the meter of autograd while the piece runs: B = I + W."""
    counted = []
    with flop_counter(counted.append):
        machine.pieces(shape, repeat=1)
    amounts = amounts_of(shape, 0.0)
    block = 4 * flops("F", amounts) + 4 * (flops("I", amounts) + flops("W", amounts))
    ends = flops("head F", amounts) + flops("head B", amounts)
    assert sum(counted) == (machine.WARMUP + 1) * (BLOCKS * block + ends)


def test_pieces_without_products_have_no_flops():
    amounts = amounts_of(Shape(32, 4, 8, 3), 0.0)
    assert [piece for piece in PIECES if flops(piece, amounts) == 0.0] == ["embed F", "embed B", "norm", "AdamW"]


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


# The recorded constants and predictions are of these shapes: hidden, heads, tokens, samples, tp, vocabulary. Constants
# are fitted to those with f; s is sequence parallelism.
SHAPES = """
    64 2 32 2 1 256 f      64 2 128 4 1 256 f     128 4 64 4 1 256 f     128 4 128 4 1 256 f    256 8 64 1 1 256 f
    256 8 64 4 1 256 f     256 8 64 8 1 256 f     256 8 128 4 1 256 f    512 16 64 2 1 256 f    512 16 64 4 1 256 f
    256 8 64 8 2 256 f     256 8 64 8 8 256 f     256 8 64 4 4 256 f     256 8 64 8 4 256 fs    512 16 64 4 2 256 fs
    256 8 64 4 1 1024 f    256 8 64 32 8 256 f    256 8 64 32 8 256 fs   256 8 64 16 2 256 fs
    128 4 64 2 1 256 -     128 4 64 8 1 256 -     256 8 32 4 1 256 -     256 8 64 2 1 256 -     256 8 128 2 1 256 -
    512 16 32 2 1 256 -    256 8 64 8 4 256 -     256 8 64 4 2 256 -     256 8 64 4 8 256 -     512 16 64 8 4 256 -s
    256 8 128 2 2 512 -
"""


def test_the_measured_shapes_are_those_of_the_recording():
    written = []
    for s, fitted in machine.shapes(256, 64, 256):
        flag = ("f" if fitted else "-") + ("s" if s.sequence_parallel else "")
        written += [*map(str, (s.hidden, s.heads, s.seq_len, s.samples, s.tp, s.vocab_size)), flag]
    assert written == SHAPES.split()


COSTS = Costs(1e9, *(1e-9 * (2 + i) for i in range(len(fields(Costs)) - 1)))


@pytest.mark.parametrize(("recompute", "sequence"), [("none", False), ("full", True)])
def test_the_planner_gets_the_pieces_of_a_layouts_shape(recompute, sequence):
    """Of 4 microbatches one writes the weights' gradients, and 3 add to them; of 5 layers a rank of 2 has 3."""
    layout = Layout(dp=1, tp=2, pp=2, microbatch=3, microbatches=4, recompute=recompute, sequence_parallel=sequence)
    found = COSTS.compute(ModelShape(5, 32, 4, 64, positions=8), layout, 8, 1000.0)
    shape = Shape(32, 4, 8, 3, 2, sequence, 64)
    time = {piece: COSTS.seconds(piece, shape, 1000.0) for piece in PIECES}
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
            "update": 1000 * (COSTS.norm_parameter + COSTS.update_parameter)
            + tensors * (COSTS.norm_tensor + COSTS.update_tensor),
        },
        rel=1e-12,
    )


def test_pieces_are_measured_in_float32():
    inputs, targets, x, gradient = machine._arrays(Shape(32, 4, 8, 2, 4, True, 64))
    assert x.dtype == gradient.dtype == np.float32 and x.shape == gradient.shape == (2, 8 // 4, 32)
    assert inputs.shape == targets.shape == (2, 8) and 0 <= inputs.min() and inputs.max() < 64


def test_the_optimizer_updates_the_measured_blocks_tensors():
    model, _ = machine._build(Shape(32, 4, 8, 2))
    amounts = amounts_of(Shape(32, 4, 8, 2), 1000.0)
    assert len(model.h) == BLOCKS and len(model.parameters()) == amounts["tensors"]
    assert (amounts["parameters"], amounts["once"]) == (1000.0, 1)


# ---- the subcommands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_machine_gives_constants_pieces_and_messages(ranks):
    rows = bench(ranks, "machine", *SMALL.split())
    constants = {row["name"]: row["value"] for row in rows if row["row"] == "constant"}
    links = {"message_alpha", "message_beta"} if ranks > 1 else set()  # no other rank
    assert set(constants) == {field.name for field in fields(Costs)} | links
    assert constants["flops_per_second"] > 0 and min(constants.values()) >= 0
    pieces = [row for row in rows if row["row"] == "piece"]
    shapes = machine.shapes(32, 8, 16)
    assert len(pieces) == len(shapes) * (len(PIECES) + len(SUMS))
    assert {row["fitted"] for row in pieces} == {True, False}
    for row in pieces:
        assert row["seconds"] > 0 and row["ratio"] == pytest.approx(row["predicted"] / row["seconds"])
    assert [row["bytes"] for row in rows if row["row"] == "message"] == (
        list(machine.MESSAGE_BYTES) if ranks > 1 else []
    )


@pytest.mark.long
def test_layouts_gives_time_and_memory_of_each_layout():
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


@pytest.mark.long
def test_layouts_prices_messages_with_the_network():
    """Two steps with the same messages: a second for each is seen on the clock, not waited for."""
    flags = "layouts --layers 2 --hidden 16 --heads 4 --seq-len 8 --vocab-size 16 --global-batch 8 --repeat 1"
    rows = bench(2, *flags.split(), "--network", "1", "0")
    assert all((row["seconds"] > 1) == (row["ranks"] > 1) for row in rows)


def test_the_layouts_use_every_kind_of_parallelism():
    resolved = layouts.configs(ModelConfig(8, 256, 8, 64, 256), 32, 8)
    assert 20 <= len(resolved) == len(set(resolved))
    assert {layouts.layout_of(config).gpus for config in resolved} == {1, 2, 4, 8}
    assert {config.mesh.zero_stage for config in resolved} == {0, 1, 2, 3}
    assert {config.data.global_batch for config in resolved} == {32}
    for axis in ("dp", "tp", "pp"):
        assert {getattr(config.mesh, axis) for config in resolved} == {1, 2, 4, 8}
    schedules = {config.mesh.schedule for config in resolved if config.mesh.pp > 1}
    assert {"naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1"} <= schedules


@pytest.mark.parametrize("ranks", [1, 4])
def test_fewer_ranks_get_the_layouts_that_fit_on_them(ranks):
    model = ModelConfig(8, 256, 8, 64, 256)
    sizes = [layouts.layout_of(config).gpus for config in layouts.configs(model, 32, ranks)]
    every = [layouts.layout_of(config).gpus for config in layouts.configs(model, 32, 8)]
    assert sizes == [size for size in every if size <= ranks] and max(sizes) == ranks


def test_a_model_that_a_layout_cannot_cut_is_refused():
    with pytest.raises(UsageError, match="heads/tp = 4/8"):
        layouts.configs(ModelConfig(8, 16, 4, 8, 16), 32, 8)
