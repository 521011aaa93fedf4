"""Each benchmark of `python -m minipar.bench` runs, and its rows are what it promises. Times are read, not asserted."""

import json
import sys
import threading
from types import SimpleNamespace

import pytest
from launcher import run_mpi

from minipar.bench import bits, collectives, layouts, machine
from minipar.bench.__main__ import SUBCOMMANDS, bench
from minipar.comm import Network, run_local, serial
from minipar.errors import UsageError


def check_step(rows):
    (row,) = rows
    assert row["ratio"] == row["seconds"] / row["torch_seconds"]


def check_zero(rows):
    assert all(row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"]) for row in rows)


def check_overlap(rows):
    (row,) = rows
    assert row["ratio"] == pytest.approx(row["wall_seconds"] / (row["cpu_seconds"] / row["cores"]))


def check_pipeline(rows):
    p, m = 2, 4
    closed = [(p - 1) / (m + p - 1), (p - 1) / (m + p - 1), (p - 1) / (2 * m + p - 1), (p - 1) / (3 * m + p - 1)]
    assert [row["bubble_closed_form"] for row in rows] == pytest.approx(closed)
    for row in rows:
        assert 0 < row["bubble_min"] <= row["bubble_measured"] <= row["bubble_max"] < 1


def check_bits(rows):
    """With trees every layout has one device's bits, with rings it has others."""
    first, *others = rows
    assert all(row["tree"] == first["tree"] and row["ring"] != first["ring"] for row in others)


def check_machine(rows):
    for row in rows:
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["predicted_seconds"] > 0 and row["peak_bytes"] > 0
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.15)


TINY = "--hidden 16 --heads 2 --seq-len 8 --repeat 1"
RUNS = {  # ranks, flags, what else its rows promise, and the values of these keys in each row
    "step": (1, f"--layers 1 --batch 2 {TINY}", check_step, "hidden", [(16,)]),
    "zero": (3, f"--layers 1 --batch 2 {TINY}", check_zero, "ranks zero_stage", [(3, 0), (3, 1), (3, 2), (3, 3)]),
    "overlap": (2, f"--layers 1 --batch 1 {TINY}", check_overlap, "ranks", [(2,)]),
    "pipeline": (2, f"--batch 1 --microbatches 4 {TINY}", check_pipeline, "schedule",
        [("gpipe",), ("1f1b",), ("interleaved-1f1b",), ("zb-h1",)]),
    "bits": (1, "--steps 1", check_bits, "layout", [("one device",), ("--dp 2",), ("--tp 2",)]),
    "machine": (2, "--hidden 32 --seq-len 8 --repeat 1", check_machine, "dp pp zero_stage schedule",
        [(1, 1, 0, None), (2, 1, 1, None), (1, 2, 0, "gpipe")]),
}  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """Run a benchmark on so many threads, with few layouts and shapes."""
    monkeypatch.setattr(bits, "LAYOUTS", ("", "--dp 2", "--tp 2"))
    monkeypatch.setattr(bits, "SIZES", "--layers 1 --hidden 16 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 2")
    three = ("", "--dp 2 --zero-stage 1 --microbatches 2", "--pp 2 --schedule gpipe --microbatches 4")
    monkeypatch.setattr(layouts, "LAYOUTS", three)
    monkeypatch.setattr(machine, "SHAPES", machine.SHAPES[:1] + machine.SHAPES[9:14])

    def run_it(ranks, *words):
        monkeypatch.setattr(sys, "argv", ["minipar.bench", *words])
        run_local(ranks, bench)

    return run_it


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_has_the_rows_that_it_promises(name, run, capsys):
    if name == "step":
        pytest.importorskip("torch")  # which `make reference` has
    ranks, flags, check, keys, expected = RUNS[name]
    run(ranks, name, "--json", "-", *flags.split())
    rows = json.loads(capsys.readouterr().out)
    assert [tuple(row[key] for key in keys.split()) for row in rows] == expected
    check(rows)


def test_collectives_are_measured_next_to_mpis():
    words = "-m minipar.bench collectives --ops all_reduce broadcast --sizes 80 1024 --json -"
    result = run_mpi(3, words.split(), timeout=90)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    sizes = [("all_reduce", 80), ("all_reduce", 1024), ("broadcast", 80), ("broadcast", 1024)]
    assert [(row["op"], row["bytes"]) for row in rows] == sizes
    assert all(row["wire_bytes"] == row["wire_bytes_expected"] > 0 for row in rows)
    assert all(row["ratio"] == row["seconds"] / row["mpi_seconds"] for row in rows)


def test_every_benchmark_is_run():
    assert {*RUNS, "collectives"} == set(SUBCOMMANDS)


@pytest.mark.parametrize(
    ("ranks", "words", "named"),
    [
        (1, "step --hidden 65", "hidden 65"),
        (2, "step", "2"),
        (2, "bits", "2"),
        (2, "overlap --repeat 0", "--repeat"),
        (1, "pipeline", "2 ranks"),
        (2, "collectives --ops barrier gather", "gather"),
        (2, "machine --hidden 12", "--hidden 12"),
        (1, "step --repe 3", "--repe"),
        (1, "", "subcommand"),
    ],
)
def test_bad_arguments_are_refused_with_the_users_values(ranks, words, named, run):
    with pytest.raises(UsageError) as caught:
        run(ranks, *words.split())
    assert named in str(caught.value)


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
    row = collectives.measure(serial(), "all_reduce", "auto", 80)
    assert (row["seconds"], row["mpi_seconds"], row["ratio"]) == pytest.approx((1e-3, 4e-3, 1 / 4))
    assert turns.count("o") == pytest.approx(turns.count("t"), abs=1)


def test_the_network_that_is_measured_is_the_one_there_is(monkeypatch):
    """The time is that of the ranks' model clocks, which messages of a known network move, and nothing else."""
    here = threading.local()

    def rank(comm):
        here.clock = comm.clock
        return machine.measure_messages(comm)

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: here.clock.now()))
    monkeypatch.setattr(machine, "MESSAGE_BYTES", (0, 1000, 64_000))
    one_message = 1 / (2 * machine.ROUND_TRIPS)  # nobody waits for the last one to arrive
    for network in run_local(2, rank, clock="model", network=Network(alpha=1e-5, beta=2e-9)):
        assert network.alpha == pytest.approx(1e-5, rel=1.01 * one_message)
        assert network.beta == pytest.approx(2e-9, rel=1.01 * one_message)
