"""A run that is killed, whatever the moment: a whole checkpoint is there, and the run goes on from it."""

import json
import signal
import time

import pytest
from launcher import interrupt_mpi, kill_mpi, run_mpi

from minipar.train.checkpoint import checkpoints

SHAPE = "-m minipar.train --hidden 20 --heads 4 --seq-len 8 --vocab-size 257 --dtype float64 --global-batch 12"
SHAPE += " --save-every 1"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def newest(folder):
    return max((step for step, _ in checkpoints(folder)), default=0) if folder.is_dir() else 0


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


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(folder):
    """SIGKILL for all ranks and mpirun: in the middle of a save (files half written, all written, the manifest there),
    and at other times; each time the next start finds a whole checkpoint that is not an older one."""
    flags = "--layers 4 --dropout 0.1 --steps 100000 --reduction ordered --clip-grad 1 --dp 2 --zero-stage 1"
    command = [*SHAPE.split(), *flags.split(), "--save", str(folder)]
    interrupted = 0
    for moment in ("*.partial", "*.partial/rank-00001.safetensors", "*.partial/manifest.json", 0.07, 0.13):
        before = newest(folder)
        resume = ["--resume", str(folder)] if before else []
        come = seen(folder, moment) if isinstance(moment, str) else later(folder, moment)
        ended = kill_mpi(2, [*command, *resume], come)
        assert ended is None, f"the run ended before it was killed: {ended}"
        interrupted += any(folder.glob("*.partial"))
        assert newest(folder) > before
    assert interrupted >= 2, "no save was interrupted"
    before = newest(folder)
    result = run_mpi(2, [*command, "--resume", str(folder), "--steps", str(before + 3), "--verify"])
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {before} " in result.stdout
    assert "verify: 2 ranks = 1 device, bit for bit" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{before + i:08d}" for i in (2, 3)]


def test_one_command_continues_on_the_ranks_that_are_left(folder, tmp_path):
    """4 ranks, of which one is killed, then 3, of which one is killed, then 2: the run of one device, within bounds."""
    metrics = tmp_path / "m.jsonl"
    flags = f"--layers 2 --zero-stage 1 --steps 60 --save {folder} --resume auto --metrics {metrics}"
    command = [*SHAPE.split(), *flags.split()]
    for ranks in (4, 3):
        before = newest(folder)
        ended = interrupt_mpi(ranks, command, seen(folder, "*"), number=signal.SIGKILL, rank=1)
        assert ended.returncode == signal.SIGKILL and before + 2 <= newest(folder) < 60
        assert ("resumed after step" in ended.stdout) == (before > 0) and f": --dp {ranks} " in ended.stdout
    before = newest(folder)
    result = run_mpi(2, [*command, "--verify"])
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {before} " in result.stdout and ": --dp 2 " in result.stdout
    assert "verify: 2 ranks = 1 device" in result.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(60))
