"""Ctrl-C and SIGTERM: one line while a job runs; a training with `--save` keeps its last step first."""

import signal
import time

import pytest
from launcher import interrupt_mpi, mpirun_is_open_mpi

pytestmark = pytest.mark.skipif(mpirun_is_open_mpi(), reason="Open MPI's mpirun kills the ranks itself")
TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --dp 3".split()
LONG = [*TRAIN, "--steps", "1000000"]

# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

RUNNING = """
import os, pathlib, time
from minipar.comm.launch import launch
def wait(comm):
    comm.barrier()
    pathlib.Path(os.environ["STARTED"], str(comm.rank)).touch()
    time.sleep(60)
launch(wait)
"""


def test_ctrl_c_is_one_line(tmp_path, monkeypatch):
    started = tmp_path / "started"
    started.mkdir()
    monkeypatch.setenv("STARTED", str(started))
    script = tmp_path / "script.py"
    script.write_text(RUNNING)
    begin = time.monotonic()
    result = interrupt_mpi(3, [str(script)], lambda: len(list(started.iterdir())) == 3)
    assert (result.returncode, result.stderr) == (130, "minipar: interrupted\n")
    assert time.monotonic() - begin < 20


# ---- a training ------------------------------------------------------------------------------------------------------


def lines(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, None), (signal.SIGTERM, 2)])
def test_a_signal_saves_the_step_and_ends_every_rank(number, rank, tmp_path):
    """The signal goes to mpirun, or to one rank alone."""
    folder, metrics = tmp_path / "run", tmp_path / "m.jsonl"
    flags = [*LONG, "--save", str(folder), "--metrics", str(metrics)]
    result = interrupt_mpi(3, flags, lambda: lines(metrics) >= 2, number=number, rank=rank)
    step = lines(metrics)
    assert (result.returncode, result.stderr) == (128 + number, "")
    last = result.stdout.splitlines()[-1]
    assert number.name in last and f"step {step};" in last and str(folder) in last
    assert [path.name for path in folder.iterdir()] == [f"step-{step:08d}"]


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    started = tmp_path / "started"
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, time
from pathlib import Path
from minipar.comm.launch import launch
from minipar.train import trainer
from minipar.train.__main__ import run

def endless(self, index):
    if self.mesh.world.rank == 1:
        Path({str(started)!r}).touch()
    time.sleep(100)
trainer.Trainer.step = endless
sys.argv[1:] = {[*TRAIN[2:], "--save", str(tmp_path / "run")]!r}
launch(run)
""")
    result = interrupt_mpi(3, [str(script)], started.exists, timeout=30, number=signal.SIGTERM, rank=1, times=2)
    assert result.returncode == signal.SIGTERM
    assert list((tmp_path / "run").glob("step-*")) == []


def test_without_save_a_signal_ends_the_training_at_once(tmp_path):
    metrics = tmp_path / "m.jsonl"
    flags = [*LONG, "--metrics", str(metrics)]
    result = interrupt_mpi(3, flags, lambda: lines(metrics) >= 2, number=signal.SIGTERM, rank=1)
    assert result.returncode == signal.SIGTERM and "saved" not in result.stdout
