"""Each benchmark of `python -m minipar.bench` runs, and its rows are what it promises. Times are read, not asserted."""

import json
import sys
import threading
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from minipar.bench import bits, collectives, layouts, machine
from minipar.bench.__main__ import SUBCOMMANDS, bench
from minipar.bench.context import WaitingClock
from minipar.bench.costs import PIECES, SUMS, Costs
from minipar.comm import Communicator, Network, run_local, serial
from minipar.errors import UsageError


def check_collectives(rows):
    assert all(row["wire_bytes"] == row["wire_bytes_expected"] > 0 for row in rows)


def check_step(rows):
    assert all(row["gemm_seconds"] > 0 for row in rows)
    assert all((row["torch_seconds"] is None) == (row["ratio"] is None) for row in rows), "None where there is no torch"


def check_ratios(rows):
    assert all(row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"]) for row in rows)


def check_overlap(rows):
    for row in rows:
        assert row["ratio"] == pytest.approx(row["wall_seconds"] / (row["cpu_seconds"] / row["cores"]))


def check_pipeline(rows):
    p, m = 2, 4
    closed = [(p - 1) / (m + p - 1), (p - 1) / (m + p - 1), (p - 1) / (2 * m + p - 1), (p - 1) / (3 * m + p - 1)]
    assert [row["bubble_closed_form"] for row in rows] == pytest.approx(closed)
    for row in rows:
        assert 0 < row["bubble_min"] <= row["bubble_measured"] <= row["bubble_max"] < 1


def check_context(rows):
    assert all(row["of_one"] > 0 and 0 < row["efficiency"] <= 1 for row in rows)


def check_bits(rows):
    """With trees every layout has one device's bits, with rings it has others."""
    first, *others = rows
    for row in others:
        assert row["tree_bits"] == first["tree_bits"] and row["tree_difference"] == 0
        assert row["ring_bits"] != first["ring_bits"] and row["ring_difference"] < 1e-14


def check_machine(rows):
    constants = {row["name"]: row["value"] for row in rows if row["row"] == "constant"}
    assert set(constants) == {field.name for field in fields(Costs)} and min(constants.values()) >= 0
    pieces = [row for row in rows if row["row"] == "piece"]
    assert len(pieces) == 7 * (len(PIECES) + len(SUMS))
    assert all(row["ratio"] == pytest.approx(row["predicted"] / row["seconds"]) for row in pieces)


def check_layouts(rows):
    """Each message takes a second on the clock."""
    for row in rows:
        assert (row["seconds"] > 1) == (row["ranks"] > 1)
        assert len(row["ranks_peak_bytes"]) == row["ranks"] and max(row["ranks_peak_bytes"]) == row["peak_bytes"] > 0


def check_modelled(rows):
    """The clock's time is the planner's."""
    (row,) = rows
    assert row["ratio"] == row["predicted_seconds"] / row["seconds"] == pytest.approx(1, abs=0.02)
    parts = row["compute"] + row["bubble"] + sum(row[f"exposed_{axis}"] for axis in ("tp", "cp", "ep", "pp", "dp"))
    assert row["predicted_seconds"] == pytest.approx(parts)


TINY = "--hidden 16 --heads 2 --seq-len 8 --repeat 1"
MODEL = "--layers 2 --hidden 8 --heads 2 --seq-len 4 --vocab-size 16 --global-batch 4"
RUNS = {  # ranks, flags, what else its rows promise, and the values of these keys in each row
    "collectives": (3, "--ops all_reduce,broadcast --sizes 80,1K --algorithms auto", check_collectives, "op bytes",
        [("all_reduce", 80), ("all_reduce", 1024), ("broadcast", 80), ("broadcast", 1024)]),
    "step": (1, "--layers 1 --batch 2 --hidden 16,32 --heads 2 --seq-len 8 --repeat 1", check_step, "hidden",
        [(16,), (32,)]),
    "zero": (3, f"--layers 1 --batch 2 {TINY}", check_ratios, "ranks zero_stage prefetch",
        [(3, 0, None), (3, 1, None), (3, 2, None), (3, 3, True), (3, 3, False)]),
    "overlap": (2, f"--layers 1 --batch 1 {TINY}", check_overlap, "ranks sync", [(2, "naive"), (2, "buckets")]),
    "pipeline": (2, f"--batch 1 --microbatches 4 {TINY}", check_pipeline, "schedule layers",
        [("gpipe", 4), ("1f1b", 4), ("interleaved-1f1b", 4), ("zb-h1", 4)]),
    "context": (4, "--seq-len 32 --heads 1 --repeat 1", check_context, "order published",
        [("zigzag", 1), ("contiguous", pytest.approx(33 / 57))]),
    "reductions": (4, "--layers 1 --hidden 16 --heads 4 --seq-len 8 --global-batch 4 --tp 2 --repeat 1", check_ratios,
        "reduction tp", [("ring", 2), ("ordered", 2), ("tree", 2)]),
    "bits": (1, "--steps 1 --dtype float64", check_bits, "layout", [("one device",), ("--dp 2",), ("--tp 2",)]),
    "machine": (1, "--hidden 32 --seq-len 8 --vocab-size 16 --repeat 1", check_machine, "", None),
    "layouts": (2, f"{MODEL} --repeat 1 --network 1 0", check_layouts, "ranks dp pp zero_stage schedule",
        [(1, 1, 1, 0, None), (2, 2, 1, 1, None), (2, 1, 2, 0, "gpipe")]),
    "modelled": (1, f"--flops 1e9 --gpus-per-node 2 -- {MODEL} --dp 2 --tp 2", check_modelled, "ranks hosts dp tp",
        [(4, 2, 2, 2)]),
}  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """Run a benchmark on so many threads, with few layouts and shapes."""
    monkeypatch.setattr(bits, "LAYOUTS", ("", "--dp 2", "--tp 2"))
    monkeypatch.setattr(bits, "SIZES", "--layers 1 --hidden 16 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 2")
    three = ("", "--dp 2 --zero-stage 1 --microbatches 2", "--pp 2 --schedule gpipe --microbatches 4")
    monkeypatch.setattr(layouts, "LAYOUTS", three)
    monkeypatch.setattr(machine, "FITTED", machine.FITTED[:1] + machine.FITTED[9:14])
    monkeypatch.setattr(machine, "CHECKED", machine.CHECKED[:1])

    def run_it(ranks, *words):
        monkeypatch.setattr(sys, "argv", ["minipar.bench", *words])
        run_local(ranks, bench)

    return run_it


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_has_the_rows_that_it_promises(name, run, capsys):
    ranks, flags, check, keys, expected = RUNS[name]
    run(ranks, name, "--json", "-", *flags.split())
    rows = json.loads(capsys.readouterr().out)
    assert expected is None or [tuple(row[key] for key in keys.split()) for row in rows] == expected
    assert all(row["seconds"] > 0 for row in rows if row.get("seconds") is not None)
    check(rows)


def test_every_benchmark_is_run():
    assert set(RUNS) == set(SUBCOMMANDS)


@pytest.mark.parametrize(
    ("ranks", "words", "named"),
    [
        (2, "step --hidden 65", "hidden 65"),
        (2, "step --hidden 16 x", "x"),
        (2, "overlap --repeat 0", "--repeat 0"),
        (2, "pipeline --layers 3", "layers 3"),  # interleaved-1f1b has 4 stages
        (1, "pipeline", "2 ranks"),
        (1, "context", "2 ranks"),
        (1, "collectives --ops barrier,gather", "gather"),
        (2, "bits", "2"),
        (1, "bits --steps 0", "--steps 0"),
        (1, "machine --hidden 12", "--hidden 12"),
        (2, "layouts --global-batch 3", "3"),
        (1, "modelled -- --dp 2048 --global-batch 2048", "2048 ranks"),
        (1, "modelled -- --dp 2 --reduction tree --global-batch 2", "tree"),
        (1, "step --repe 3", "--repe"),
        (1, "", "subcommand"),
    ],
)
def test_bad_arguments_are_refused_with_the_users_values(ranks, words, named, run):
    with pytest.raises(UsageError) as caught:
        run(ranks, *words.split())
    assert named in str(caught.value)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_sums_of_sums_stay_finite(op):
    def rank(comm):
        ours, _ = collectives._calls(comm, op, "auto", 6, np.dtype("float32"))
        with np.errstate(all="raise"):
            for _ in range(200):
                ours()

    run_local(2, rank)


def test_a_collective_is_timed_in_turns_with_mpis(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    turns = []

    def taking(who, seconds):
        def call():
            turns.append(who)
            clock.now += seconds

        return call

    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(collectives, "_calls", lambda *_: (taking("o", 1e-3), taking("t", 4e-3)))
    row = collectives.measure(serial(), "all_reduce", "auto", 80, np.dtype("float64"))
    assert (row["seconds"], row["mpi_seconds"], row["ratio"]) == pytest.approx((1e-3, 4e-3, 1 / 4))
    assert turns.count("o") == pytest.approx(turns.count("t"), abs=1)


def test_the_waiting_clock_separates_waiting_from_work():
    """Rank 0 computes for 0.2 seconds and sends; rank 1 computes for 0.1, receives, and computes for 0.1 more."""

    def rank(comm):
        clock = WaitingClock()
        comm, message = Communicator(comm.transport, clock=clock), np.zeros(1)
        comm.barrier()
        start, waited = clock.now(), clock.waited

        def compute(seconds):
            end = clock.now() + seconds
            while clock.now() < end:
                pass

        if comm.rank == 0:
            compute(0.2)
            comm.isend(message, 1).wait()
        else:
            compute(0.1)
            comm.irecv(message, 0).wait()
            compute(0.1)
        return clock.now() - start, clock.waited - waited

    assert run_local(2, rank) == [pytest.approx((0.2, 0), abs=0.02), pytest.approx((0.3, 0.1), abs=0.02)]


def test_the_network_that_is_measured_is_the_one_there_is(monkeypatch):
    """The time is that of the ranks' model clocks, which messages of a known network move, and nothing else."""
    here = threading.local()

    def rank(comm):
        here.clock = comm.clock
        return machine.measure_messages(comm)

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: here.clock.now()))
    monkeypatch.setattr(machine, "MESSAGE_BYTES", (0, 1000, 64_000))
    one_message = 1 / (2 * machine.ROUND_TRIPS)  # nobody waits for the last one to arrive
    for network, rows in run_local(2, rank, clock="model", network=Network(alpha=1e-5, beta=2e-9)):
        assert network.alpha == pytest.approx(1e-5, rel=1.01 * one_message)
        assert network.beta == pytest.approx(2e-9, rel=1.01 * one_message)
        assert [row["seconds"] for row in rows] == pytest.approx([1e-5, 1.2e-5, 13.8e-5], rel=1.01 * one_message)
