"""`bench modelled`: any layout on a modelled cluster, next to the prediction; mistakes are one line."""

import json

import pytest
from launcher import run_each, run_mpi

FLAGS = "--dp 4 --tp 2 --pp 2 --layers 4 --hidden 32 --heads 4 --seq-len 8 --global-batch 16 --microbatches 4".split()


def test_a_row_has_the_clocks_time_and_the_planners():
    command = ["-m", "minipar.bench", "modelled", "--gpus-per-node", "4", "--flops", "1e9", "--json", "-", "--", *FLAGS]
    result = run_mpi(1, command)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert (row["ranks"], row["hosts"], row["dp"], row["tp"], row["pp"]) == (16, 4, 4, 2, 2)
    assert row["ratio"] == pytest.approx(1, abs=0.05) and row["ratio"] == row["predicted_seconds"] / row["seconds"]
    parts = row["compute"] + row["bubble"] + sum(row[f"exposed_{axis}"] for axis in ("tp", "cp", "ep", "pp", "dp"))
    assert row["predicted_seconds"] == pytest.approx(parts)  # products alone take time: the update takes none


def test_context_parallelism_and_llama_are_modelled_and_planned():
    flags = "--cp 4 --tp 2 --model llama --kv-heads 4 --layers 4 --hidden 32 --heads 4 --seq-len 64 --global-batch 2"
    command = ["-m", "minipar.bench", "modelled", "--flops", "1e9", "--json", "-", "--", *flags.split()]
    result = run_mpi(1, command)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert (row["ranks"], row["dp"], row["cp"], row["tp"]) == (8, 1, 4, 2) and row["exposed_cp"] > 0
    assert row["ratio"] == pytest.approx(1, abs=0.03)


def test_experts_are_modelled_and_planned():
    flags = "--dp 4 --ep 2 --model mixtral --experts 4 --top-k 4 --layers 4 --hidden 32 --heads 4 --seq-len 64"
    command = ["-m", "minipar.bench", "modelled", "--flops", "1e9", "--json", "-", "--", *flags.split()]
    result = run_mpi(1, [*command, "--global-batch", "4"])
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert (row["ranks"], row["dp"], row["ep"]) == (4, 4, 2) and row["exposed_ep"] > 0
    assert row["ratio"] == pytest.approx(1, abs=0.01)


MISTAKES = [
    (2, "", "--dp 2", "makes its own ranks; mpirun started 2"),
    (1, "--gpus-per-node 0", "--dp 2", "--gpus-per-node 0: expected at least 1"),
    (1, "--gpus-per-node 3", "--dp 8", "gpus 8 are not a multiple of gpus-per-node 3"),
    (1, "--flops 0", "--dp 2", "each must be above 0"),
    (1, "", "--dp 2 --verify", "takes one step of random tokens"),
    (1, "", "--dp 2 --data /nowhere", "takes one step of random tokens"),
    (1, "", "--dp 2048 --global-batch 2048", "2048 ranks, --reduction ring: at most 1024"),
    (1, "", "--dp 2 --reduction ordered", "2 ranks, --reduction ordered: at most 1024, and ring"),
    (1, "", "--model mixtral --tp 4 --etp 3 --sequence-parallel", "tp/etp = 4/3 is not a whole number"),
    (1, "", "--dp 3", "global-batch 32 is not divisible by dp*microbatches = 3*1 = 3"),
]


@pytest.fixture(scope="module")
def refusals():
    results = {}
    for ranks in (1, 2):
        given = [(own, flags) for size, own, flags, _ in MISTAKES if size == ranks]
        commands = [["minipar.bench", "modelled", *own.split(), "--", *flags.split()] for own, flags in given]
        results |= zip(given, run_each(ranks, commands), strict=True)
    return results


@pytest.mark.parametrize(("ranks", "own", "flags", "words"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(ranks, own, flags, words, refusals):
    result = refusals[own, flags]
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and words in result.stderr
