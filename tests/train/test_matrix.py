"""Claims about the matrix of docs/combinations.md: each cell, when run, is equal, within the bound, or refused."""

import re
from pathlib import Path

import pytest
import training
from combinations import TEXT, VOCAB
from launcher import run_mpi
from training import verdicts

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.schedules import make
from minipar.train.config import schedule_of
from minipar.train.progress import notes

DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"
SHAPE = f"--layers 4 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB} --global-batch 8 --steps 2 --eps 1e-5"


def config_for(flags):
    config = training.config_for(f"{SHAPE} --dtype float64 --reduction ordered {flags}")
    if config.mesh.pp > 1:
        schedule_of(config)
    return config


def outcome(flags):
    """Run a cell: "no" if refused, "=" if bit for bit, "≈" if within the bound, each with "*" if a note says a cost."""
    try:
        config = config_for(flags)
    except UsageError:
        return "no"
    verdict = verdicts(config, TEXT)[0]
    assert verdict.passed, verdict.line
    sign = "=" if "bit for bit" in verdict.line else "≈"
    return sign + ("*" if notes(config) else "")


def tables():
    """The two tables under "The matrix": lists of rows, rows as lists of cells."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## The matrix")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks]


def matrix():
    """{(flags of the row, flags of the column): cell}."""
    columns, cells = tables()
    flags = {name: text.strip("`") if "`" in text else "" for name, text in columns[2:]}
    names = cells[0][1:]
    return {
        (row[0].strip("`") if "`" in row[0] else "", flags[name]): cell
        for row in cells[2:]
        for name, cell in zip(names, row[1:], strict=True)
    }


EVERY = 6  # each sixth cell in `make test`, the others in `make long`


@pytest.mark.sampled(EVERY)
@pytest.mark.parametrize("cell", list(matrix()), ids=lambda cell: " x ".join(cell))
def test_a_cell_of_the_matrix_is_true(cell):
    assert outcome(" ".join(cell)) == matrix()[cell]


def test_the_matrix_has_every_strategy():
    assert len(matrix()) >= 48
    words = " ".join(" ".join(cell) for cell in matrix())
    for flag in ("--dp", "--tp", "--pp", "--sequence-parallel", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"):
        assert flag in words
    run = list(matrix())[::EVERY]
    assert [set(flags) for flags in zip(*run, strict=True)] == [set(flags) for flags in zip(*matrix(), strict=True)]


# ---- notes on what a layout costs ------------------------------------------------------------------------------------


def notes_on(flags):
    config = config_for(flags)
    return " / ".join(notes(config))


def test_usual_layouts_have_no_notes():
    for flags in (
        "",
        "--dp 2",
        "--dp 2 --zero-stage 3",
        "--tp 2 --sequence-parallel",
        "--dp 2 --pp 2 --microbatches 4",
    ):
        assert notes_on(flags) == ""
    assert notes_on("--dp 2 --tp 2 --pp 2 --microbatches 4 --zero-stage 1") == ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_one_replica_shards_nothing(stage):
    assert f"--zero-stage {stage} shards nothing: dp = 1" in notes_on(f"--tp 2 --zero-stage {stage} --microbatches 2")
    replicas = f"--zero-stage {stage} shards nothing: dp = 2 in 2 replicas"
    assert replicas in notes_on(f"--dp 2 --zero-stage {stage} --zero-replicas 2")


def test_stage_3_gathers_again_for_each_microbatch():
    assert "forward and backward: 2*4 = 8 times per step" in notes_on("--dp 2 --zero-stage 3 --microbatches 4")
    assert "gathers" not in notes_on("--dp 2 --zero-stage 3")


def test_accumulated_gradients_are_whole():
    assert (
        "4 microbatches add up in whole gradients, which --zero-stage 2 then shards; --sync-every-microbatch"
        in notes_on("--dp 2 --zero-stage 2 --microbatches 4")
    )
    assert "sync-every" not in notes_on("--dp 2 --pp 2 --zero-stage 2 --microbatches 4")
    assert notes_on("--dp 2 --zero-stage 2 --microbatches 4 --sync-every-microbatch") == ""


def test_a_pipeline_of_one_microbatch_is_mostly_idle():
    assert "one microbatch: the pipeline's ranks work one after another" in notes_on("--pp 3 --schedule gpipe")
    assert "--schedule naive: the pipeline's ranks" in notes_on("--pp 2 --schedule naive --microbatches 4")
    assert [float(simulate(make("1f1b", p, 1)).bubble_fraction) for p in (2, 4)] == [1 / 2, 3 / 4]  # (p-1)/p


def test_rank_0_prints_a_note_once_under_mpirun():
    flags = f"{SHAPE} --pp 2 --zero-stage 2".replace(f"--vocab-size {VOCAB}", "--vocab-size 256")
    result = run_mpi(2, ["-m", "minipar.train", *flags.split()], timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("note: --zero-stage 2 shards nothing") == result.stdout.count("one after another") == 1
