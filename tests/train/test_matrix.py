"""Claims about the README's matrix of what goes with what: each cell is run, or refused, as it says."""

import re
from pathlib import Path

import pytest
import training
from combinations import TEXT, VOCAB
from launcher import run_mpi
from training import verdicts

from minipar.errors import UsageError
from minipar.parallel.pipeline import make, simulate
from minipar.train.pipelined import schedule_of
from minipar.train.progress import notes

README = Path(__file__).parents[2] / "README.md"
SHAPE = f"--layers 4 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 8 --steps 2 --eps 1e-5"


def config_for(flags):
    config = training.config_for(f"{SHAPE} --dtype float64 --reduction ordered {flags}")
    if config.mesh.pp > 1:
        schedule_of(config)
    return config


def outcome(flags):
    """A cell: "no" for what is refused; "=" for bit for bit, "≈" for within the bound; "*" if a note says what it
    costs.
    """
    try:
        config = config_for(flags)
    except UsageError:
        return "no"
    verdict = verdicts(config, TEXT)[0]
    assert verdict.passed, verdict.line
    sign = "=" if "bit for bit" in verdict.line else "≈"
    return sign + ("*" if notes(config, config.model.seq_len) else "")


def matrix():
    """{(flags of the row, flags of the column): cell}, from the README."""
    text = README.read_text(encoding="utf-8").partition("## What goes with what")[2].partition("\n## ")[0]
    first = text[text.index("|") :].partition("\n\n")[0]  # the other table says what each sends
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    flags = [[" ".join(re.findall("`(.*?)`", cell)) for cell in row] for row in rows]
    return {(flags[r][0], flags[0][c]): rows[r][c] for r in range(2, len(rows)) for c in range(1, len(rows[0]))}


@pytest.mark.parametrize("cell", matrix(), ids=lambda cell: " x ".join(cell))
def test_a_cell_of_the_matrix_is_true(cell):
    assert outcome(" ".join(cell)) == matrix()[cell]


def test_the_matrix_has_every_strategy():
    assert len(matrix()) >= 48
    words = " ".join(" ".join(cell) for cell in matrix())
    for flag in ("--dp", "--tp", "--pp", "--sequence-parallel", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"):
        assert flag in words


# ---- what is hardly meant so says what it costs ----------------------------------------------------------------------


def said(flags):
    config = config_for(flags)
    return " / ".join(notes(config, config.model.seq_len))


def test_what_is_usual_is_not_commented():
    for flags in (
        "",
        "--dp 2",
        "--dp 2 --zero-stage 3",
        "--tp 2 --sequence-parallel",
        "--dp 2 --pp 2 --microbatches 4",
    ):
        assert said(flags) == ""
    assert said("--dp 2 --tp 2 --pp 2 --microbatches 4 --zero-stage 1") == ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_one_replica_shards_nothing(stage):
    assert f"--zero-stage {stage} shards nothing: dp = 1" in said(f"--tp 2 --zero-stage {stage} --microbatches 2")


def test_stage_3_gathers_again_for_each_microbatch():
    """Psi: 4 blocks and the embeddings with the last LayerNorm. In a pipeline rank 0's two blocks, and the embedding
    once for each lookup and once for the head.
    """
    block, embedding = 12 * 20**2 + 13 * 20, (VOCAB + 8) * 20
    psi = 4 * block + embedding + 2 * 20
    expected = f"2*4 = 8 times per step, {8 * psi:,} elements on rank 0 (--zero-stage 1: {psi:,})"
    assert expected in said("--dp 2 --zero-stage 3 --microbatches 4")
    of_rank_0 = 8 * 2 * block + 5 * embedding
    assert f"{of_rank_0:,} elements on rank 0" in said("--dp 2 --pp 2 --zero-stage 3 --microbatches 4")


def test_gradients_that_add_up_are_whole():
    assert (
        "4 microbatches add up in whole gradients, which --zero-stage 2 then shards; --sync-every-microbatch"
        in said("--dp 2 --zero-stage 2 --microbatches 4")
    )
    assert "sync-every" not in said("--dp 2 --pp 2 --zero-stage 2 --microbatches 4")
    assert said("--dp 2 --zero-stage 2 --microbatches 4 --sync-every-microbatch") == ""


def test_a_pipeline_of_one_microbatch_is_mostly_idle():
    assert "one microbatch: the pipeline's ranks work one after another, bubble 0.667" in said(
        "--pp 3 --schedule gpipe"
    )
    assert "--schedule naive: the pipeline's ranks" in said("--pp 2 --schedule naive --microbatches 4")
    assert [float(simulate(make("1f1b", p, 1)).bubble_fraction) for p in (2, 4)] == [1 / 2, 3 / 4]  # (p-1)/p


def test_rank_0_says_it_once_under_mpirun():
    flags = f"{SHAPE} --pp 2 --zero-stage 2".replace(f"--vocab-size {VOCAB}", "--vocab-size 256")
    result = run_mpi(2, ["-m", "minipar.train", *flags.split()], timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("note: --zero-stage 2 shards nothing") == result.stdout.count("bubble 0.5") == 1
