"""The benchmarks run and say what they promise to say. Their times are for reading, not for asserting."""

import json

import pytest
from launcher import run_mpi


def bench(ranks, *arguments):
    result = run_mpi(ranks, ["-m", "minipar.bench", *arguments, "--json", "-"], timeout=90)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)  # nothing else goes to standard output


def test_step_compares_a_row_for_each_hidden_size():
    rows = bench(1, *"step --layers 1 --hidden 16,32 --heads 2 --seq-len 8 --batch 2 --repeat 2".split())
    assert [row["hidden"] for row in rows] == [16, 32]
    for row in rows:
        assert row["seconds"] > 0 and row["gemm_seconds"] > 0
        assert (row["torch_seconds"] is None) == (row["ratio"] is None)  # None where torch is not installed


def test_step_on_several_ranks_compares_the_zero_stages():
    rows = bench(3, *"step --layers 1 --hidden 16 --heads 2 --seq-len 8 --batch 2 --repeat 2".split())
    assert [(row["zero_stage"], row["prefetch"]) for row in rows] == [
        (0, None), (1, None), (2, None), (3, True), (3, False),
    ]  # fmt: skip
    for row in rows:
        assert row["ranks"] == 3 and row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])


def test_overlap_compares_both_ways_to_synchronize_with_the_computation():
    rows = bench(3, *"overlap --layers 1 --hidden 16 --heads 2 --seq-len 8 --batch 1 --repeat 2".split())
    assert [row["sync"] for row in rows] == ["naive", "buckets"]
    for row in rows:
        assert row["ranks"] == 3
        assert row["ratio"] == pytest.approx(row["wall_seconds"] / (row["cpu_seconds"] / row["cores"]))


@pytest.mark.parametrize(
    "arguments", [["step", "--hidden", "65"], ["overlap", "--hidden", "65"], ["step", "--repeat", "0"]]
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments):
    result = run_mpi(2, ["-m", "minipar.bench", *arguments], timeout=30)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("minipar: error:")
