"""The benchmarks run, and their rows are what they promise. Their times are for reading, not for asserting."""

import json
from argparse import Namespace

import numpy as np
import pytest
from launcher import run_each, run_mpi

from minipar.bench import bits
from minipar.bench.context import WaitingClock
from minipar.comm import Communicator, run_local, serial


def bench(ranks, *arguments):
    result = run_mpi(ranks, ["-m", "minipar.bench", *arguments, "--json", "-"], timeout=90)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)  # nothing else goes to standard output


@pytest.mark.parametrize("hidden", ["16 32", "16,32"])
def test_step_compares_a_row_for_each_hidden_size(hidden):
    rows = bench(1, *f"step --layers 1 --hidden {hidden} --heads 2 --seq-len 8 --batch 2 --repeat 2".split())
    assert [row["hidden"] for row in rows] == [16, 32]
    for row in rows:
        assert row["seconds"] > 0 and row["gemm_seconds"] > 0
        assert (row["torch_seconds"] is None) == (row["ratio"] is None)  # None where torch is not installed


SMALL = "--hidden 16 --heads 2 --seq-len 8 --repeat 2"
ON_THREE_RANKS = {
    "zero": f"--layers 1 --batch 2 {SMALL}",
    "step": f"--layers 1 --batch 2 {SMALL}",
    "overlap": f"--layers 1 --batch 1 {SMALL}",
    "pipeline": f"--batch 1 --microbatches 6 {SMALL}",
}


@pytest.fixture(scope="module")
def rows_of_three_ranks():
    commands = [["minipar.bench", name, *flags.split(), "--json", "-"] for name, flags in ON_THREE_RANKS.items()]
    results = run_each(3, commands, timeout=90)
    return {name: json.loads(result.stdout) for name, result in zip(ON_THREE_RANKS, results, strict=True)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subcommand", ["zero", "step"])
def test_zero_and_step_on_several_ranks_compare_the_stages(subcommand, rows_of_three_ranks):
    rows = rows_of_three_ranks[subcommand]
    assert [(row["zero_stage"], row["prefetch"]) for row in rows] == [
        (0, None), (1, None), (2, None), (3, True), (3, False),
    ]  # fmt: skip
    for row in rows:
        assert row["ranks"] == 3 and row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])


def test_overlap_compares_two_synchronizations_with_computation(rows_of_three_ranks):
    rows = rows_of_three_ranks["overlap"]
    assert [row["sync"] for row in rows] == ["naive", "buckets"]
    for row in rows:
        assert row["ranks"] == 3
        assert row["ratio"] == pytest.approx(row["wall_seconds"] / (row["cpu_seconds"] / row["cores"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 6)])
def test_pipeline_compares_bubbles_with_their_predictions(ranks, microbatches, rows_of_three_ranks):
    flags = f"pipeline --batch 1 --microbatches {microbatches} {SMALL}"
    rows = rows_of_three_ranks["pipeline"] if ranks == 3 else bench(ranks, *flags.split())
    assert [row["schedule"] for row in rows] == ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]
    for row in rows:
        assert (row["ranks"], row["microbatches"], row["layers"]) == (ranks, microbatches, 2 * ranks)
        assert 0 < row["bubble_min"] <= row["bubble_measured"] <= row["bubble_max"] < 1
        assert 0 < row["bubble_simulated"] < 1 and row["seconds"] > 0
    p, m = ranks, microbatches
    closed = [(p - 1) / (m + p - 1), (p - 1) / (m + p - 1), (p - 1) / (2 * m + p - 1), (p - 1) / (3 * m + p - 1)]
    assert [row["bubble_closed_form"] for row in rows] == pytest.approx(closed)


@pytest.mark.long
def test_reductions_compares_the_orders_of_sums():
    flags = "--layers 1 --hidden 16 --heads 4 --seq-len 8 --global-batch 4 --tp 2 --repeat 2"
    rows = bench(4, "reductions", *flags.split())
    assert [(row["reduction"], row["ranks"], row["tp"]) for row in rows] == [
        ("ring", 4, 2), ("ordered", 4, 2), ("tree", 4, 2),
    ]  # fmt: skip
    for row in rows:
        assert row["bytes"] > 0 and row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])


def test_bits_are_one_devices_with_trees_alone(monkeypatch, capsys):
    monkeypatch.setattr(bits, "LAYOUTS", ("", "--dp 2", "--tp 2"))
    monkeypatch.setattr(bits, "SIZES", "--layers 1 --hidden 16 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 2")
    bits.run(serial(), Namespace(steps=1, model="llama", dtype="float64", json="-"))
    first, *others = json.loads(capsys.readouterr().out)
    assert [row["layout"] for row in (first, *others)] == ["one device", "--dp 2", "--tp 2"]
    for row in others:
        assert row["tree_bits"] == first["tree_bits"] and row["tree_difference"] == 0
        assert row["ring_bits"] != first["ring_bits"] and row["ring_difference"] < 1e-14


def test_context_compares_the_orders_with_their_fractions():
    rows = bench(4, *"context --seq-len 32 --heads 1 --repeat 2".split())
    assert [(row["order"], row["ranks"], row["published"]) for row in rows] == [
        ("zigzag", 4, 1), ("contiguous", 4, pytest.approx(33 / 57)),
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["of_one"] > 0 and 0 < row["efficiency"] <= 1 for row in rows), rows


def test_the_waiting_clock_separates_waiting_from_work():
    """Rank 0 computes for 0.3 seconds and sends; rank 1 computes for 0.1, receives, and computes for 0.1 more."""

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
            compute(0.3)
            comm.isend(message, 1).wait()
        else:
            compute(0.1)
            comm.irecv(message, 0).wait()
            compute(0.1)
        return clock.now() - start, clock.waited - waited

    assert run_local(2, rank) == [pytest.approx((0.3, 0), abs=0.02), pytest.approx((0.4, 0.2), abs=0.02)]


@pytest.mark.parametrize("subcommand", ["pipeline", "context"])
def test_these_need_two_ranks(subcommand):
    result = run_mpi(1, ["-m", "minipar.bench", subcommand], timeout=30)
    assert result.returncode == 2
    assert result.stderr.startswith(f"minipar: error: bench {subcommand} needs at least 2 ranks")


BAD_ARGUMENTS = [
    ["step", "--hidden", "65"],
    ["step", "--hidden", "16", "x"],
    ["step", "--hidden", ","],
    ["overlap", "--hidden", "65"],
    ["step", "--repeat", "0"],
    ["pipeline", "--hidden", "65"],
    ["pipeline", "--microbatches", "0"],
    ["pipeline", "--layers", "3"],  # interleaved-1f1b has 4 stages
    ["machine", "--hidden", "12"],
    ["machine", "--seq-len", "6"],
    ["machine", "--repeat", "0"],
    ["layouts", "--repeat", "0"],
    ["layouts", "--network", "-1", "0"],
    ["layouts", "--global-batch", "3"],
    ["layouts", "--hidden", "65"],
    ["layouts", "--layers", "1"],
]


@pytest.fixture(scope="module")
def refusals():
    return run_each(2, [["minipar.bench", *arguments] for arguments in BAD_ARGUMENTS], timeout=30)


@pytest.mark.parametrize("which", range(len(BAD_ARGUMENTS)))
def test_bad_arguments_are_one_line_and_exit_code_2(which, refusals):
    arguments, result = BAD_ARGUMENTS[which], refusals[which]
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("minipar: error:")
    assert f"{arguments[1].strip('-')} {arguments[2]}" in result.stderr, "it names what is wrong"
