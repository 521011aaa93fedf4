"""A run that is killed, whatever the moment: a whole checkpoint is there, and the run goes on from it."""

import json
import signal
import time

import pytest
from launcher import interrupt_mpi, kill_mpi, run_mpi

from minipar.train.checkpoint import checkpoints

SHAPE = "-m minipar.train --hidden 20 --heads 4 --seq-len 8 --vocab-size 257 --dtype float64 --global-batch 12"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def newest(folder):
    return max((int(path.name[5:]) for path in checkpoints(folder)), default=0)


def seen(folder, pattern):
    """A moment: this start has finished two checkpoints, and a file like this is there."""
    before = newest(folder)
    return lambda: newest(folder) >= before + 2 and any(folder.glob(pattern))


def later(folder, seconds):
    """A moment: so many seconds after the first checkpoint of this start."""
    before = newest(folder)
    start = []

    def moment():
        if not start and newest(folder) > before:
            start.append(time.monotonic())
        return bool(start) and time.monotonic() > start[0] + seconds

    return moment


def rows(path):
    """The loss and the gradient norm of each step; of one that ran again, the last."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(folder, tmp_path):
    """SIGKILL for all ranks and mpirun, in the middle of a save and at other times: each time the next start finds a
    whole checkpoint that is not an older one, and in the end every step is that of a run which was never killed."""
    flags = "--layers 4 --dropout 0.1 --reduction ordered --clip-grad 1 --dp 2 --zero-stage 1"
    command = [*SHAPE.split(), *flags.split()]
    saving = [*command, "--save-every", "1", "--save", str(folder), "--metrics", str(tmp_path / "m.jsonl")]
    interrupted = 0
    for moment in ("*.partial", "*.partial/exp_avg", "*.partial/exp_avg_sq", 0.07, 0.13):
        before = newest(folder)
        resume = ["--resume", str(folder)] if before else []
        come = seen(folder, moment) if isinstance(moment, str) else later(folder, moment)
        ended = kill_mpi(2, [*saving, *resume, "--steps", "100000"], come)
        assert ended is None, f"the run ended before it was killed: {ended}"
        interrupted += any(folder.glob("*.partial"))
        assert newest(folder) > before
    assert interrupted >= 2, "no save was interrupted"
    before = newest(folder)
    steps = ["--steps", str(before + 3)]
    result = run_mpi(2, [*saving, "--resume", str(folder), *steps, "--verify"])
    assert result.returncode == 0, result.stderr
    assert f"from step {before + 1} on" in result.stdout
    assert "verify: 2 ranks = 1 device bit for bit" in result.stdout
    whole = run_mpi(2, [*command, *steps, "--metrics", str(tmp_path / "whole.jsonl")])
    assert whole.returncode == 0, whole.stderr
    assert rows(tmp_path / "m.jsonl") == rows(tmp_path / "whole.jsonl")


def test_a_run_goes_on_on_the_ranks_that_are_left(folder, tmp_path):
    """4 ranks, of which one is killed, then 3, of which one is killed, then 2: the run of one device, within bounds."""
    metrics = tmp_path / "m.jsonl"
    flags = f"--layers 2 --zero-stage 1 --steps 60 --save-every 1 --save {folder} --metrics {metrics}"
    command = [*SHAPE.split(), *flags.split()]
    for ranks in (4, 3):
        before = newest(folder)
        resume = ["--resume", str(folder)] if before else []
        ended = interrupt_mpi(ranks, [*command, *resume], seen(folder, "*"), number=signal.SIGKILL, rank=1)
        assert ended.returncode == signal.SIGKILL and before + 2 <= newest(folder) < 60
        assert f"from step {before + 1} on" in ended.stdout and f"minipar: dp {ranks}," in ended.stdout
    result = run_mpi(2, [*command, "--resume", str(folder), "--verify"])
    assert result.returncode == 0, result.stderr
    assert "verify: 2 ranks = 1 device" in result.stdout
    one = run_mpi(1, [*SHAPE.split(), *f"--layers 2 --steps 60 --metrics {tmp_path}/one.jsonl".split()])
    assert one.returncode == 0, one.stderr
    alone, ours = rows(tmp_path / "one.jsonl"), rows(metrics)
    assert list(alone) == sorted(ours) == list(range(60))
    for step, values in alone.items():
        assert ours[step] == pytest.approx(values, rel=1e-9)
