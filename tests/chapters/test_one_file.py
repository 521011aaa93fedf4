"""Claims about chapters/one_file.py: its proofs hold on any number of ranks, find planted mistakes, and never hang."""

import re

import pytest
from launcher import ROOT, run_mpi

PATH = ROOT / "chapters" / "one_file.py"
SOURCE = PATH.read_text(encoding="utf-8")
PSI, N, H = 65472, 128, 32  # parameters, samples, elements of a vector
POEM = "To see a World in a Grain of Sand\nAnd a Heaven in a Wild Flower\n"
ROW = re.compile(r"^(\S.*?) +(\d\.\d{4}) +(\d\.\d{4}) +(\S+e-\d\d|0\.0e\+00) +([\d,]+) = ", re.MULTILINE)


def sent_by_all(ranks):
    """The bytes that all ranks together send in a step, by row, from formulas of this test's own."""
    dp, tp, pp = {1: (1, 1, 1), 3: (3, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2)}[ranks]
    sums = 24 * (ranks - 1) * N * H  # 12 sums, each in two halves
    split = 6 * 2 * H * 4 * H  # the blocks' elements; those of embedding and head are on both ranks of tp
    in_three = 2 * (dp - 1) * (split + tp * (PSI - split)) + 24 * (tp - 1) * N * H + 2 * (pp - 1) * tp * N * H
    elements = [0, 2 * (ranks - 1) * PSI, 2 * (ranks - 1) * PSI, sums, *[2 * (ranks - 1) * N * H] * 2, in_three]
    return [8 * each for each in elements]


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_every_way_is_equal_to_one_device(ranks):
    result = run_mpi(ranks, [str(PATH)], timeout=240)
    assert (result.returncode, result.stderr) == (0, "")
    names, first, last, differences, sent = zip(*ROW.findall(result.stdout), strict=True)
    assert [name.split(",")[0] for name in names[:6]] == [
        *("one device", "data parallelism", "ZeRO 1", "tensor parallelism", "pipeline", "pipeline")
    ]
    assert len(names) == 7 and len(set(first)) == len(set(last)) == 1 and float(last[0]) < 0.01 * float(first[0])
    assert all(float(difference) < 1e-12 for difference in differences)
    assert [int(n.replace(",", "")) for n in sent] == [round(nbytes / ranks) for nbytes in sent_by_all(ranks)]
    kept = re.findall(r"(\d+) of (\d+) microbatches", result.stdout)  # by GPipe, by 1F1B
    assert kept == [(str(2 * ranks), str(2 * ranks)), (str(ranks), str(2 * ranks))] and POEM in result.stdout


def test_it_is_short_and_stands_alone():
    code = [line for line in SOURCE.splitlines() if line.strip() and not line.strip().startswith("#")]
    modules = set(re.findall(r"^(?:import|from) (\w+)", SOURCE, re.MULTILINE))
    assert len(code) <= 400 and modules == {"copy", "math", "mpi4py", "numpy", "os", "sys", "time", "traceback"}


def test_nine_ranks_get_one_line():
    result = run_mpi(9, [str(PATH)], timeout=240)
    assert result.returncode != 0 and len(result.stdout.splitlines()) == 1 and "started 9" in result.stdout


# Each with a number of ranks, the line and the wrong one, and what the program says.
MISTAKES = {
    "a wrong derivative": (1, "(1 - a * a)  # (N, 4h): ", "(1 - a)  # (N, 4h): ", "not the slope of the loss"),
    "a ring that ends early": (3, "range(1, comm.size)", "range(1, comm.size - 1)", "all_reduce is not MPI's"),
    "the mean of means": (3, "hot) / N", "hot) / len(targets) / round(N / len(targets))", "data parallelism: this"),
    "a wrong scale": (2, "hot) / N", "hot) / len(targets)", "data parallelism: this"),
    "no all-gather in ZeRO": (2, "    all_gather(zero.parameters)\n", "", "ZeRO 1: this"),
    "a sum and not a part": (2, "reduce_scatter(zero.grad", "all_reduce(zero.grad", "ZeRO 1: all ranks together"),
    "gradients that stay": (2, "    zero.gradient.fill(0)\n", "", "ZeRO 1: this"),
    "no f": (2, "all_reduce(dz @ w1.T, self.comm)", "dz @ w1.T", "tensor parallelism: this"),
    "no g": (2, "all_reduce(a @ w2, self.comm)", "a @ w2", "tensor parallelism: this"),
    "a stale activation": (2, "kept.pop(i)", "kept.pop(max(kept))", "pipeline, GPipe: this"),
    "a forward too many": (2, "p - 1 - r, p - r", "p - r, p - r", "microbatches with 1F1B, and not"),
    "no sum over dp": (3, "    reduce_scatter(model.gradient, dp)\n", "", "dp 3, tp 1, pp 1: this"),
    "a rank that fails": (3, "(sends)\n", "(sends)\n    assert r != 1, 'one fails'\n", "one fails"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_its_proofs_find_a_planted_mistake(mistake, tmp_path):
    ranks, line, wrong, words = MISTAKES[mistake]
    assert line in SOURCE
    copy = tmp_path / "one_file.py"
    copy.write_text(SOURCE.replace(line, wrong, 1), encoding="utf-8")
    result = run_mpi(ranks, [str(copy)], timeout=120)
    assert result.returncode != 0
    assert words in result.stdout + result.stderr
