"""Claims about SIGTERM and SIGINT: a training with `--save` keeps its last step, and ends; a second signal ends it."""

import signal

import pytest
from launcher import interrupt_mpi, run_mpi

from minipar.train.__main__ import noting_signals

TRAIN = "-m minipar.train --layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --dp 3".split()
LONG = [*TRAIN, "--steps", "1000000"]


def lines(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGTERM, 2)])
def test_a_signal_saves_the_step_and_ends_every_rank(number, rank, tmp_path):
    folder, metrics = tmp_path / "run", tmp_path / "m.jsonl"
    flags = [*LONG, "--save", str(folder), "--metrics", str(metrics)]
    result = interrupt_mpi(3, flags, lambda: lines(metrics) >= 2, number=number, rank=rank)
    step = lines(metrics)
    assert result.returncode == 128 + number and result.stderr == ""
    said = f"minipar: {number.name}: saved step {step} in {folder}; --resume it"
    assert result.stdout.splitlines()[-1] == said and result.stdout.count("saved") == 1
    assert [path.name for path in folder.iterdir()] == [f"step-{step:08d}"]
    if rank is not None:
        then = run_mpi(3, [*TRAIN, "--resume", str(folder), "--steps", str(step + 1), "--verify"])
        assert then.returncode == 0 and f"resumed after step {step}" in then.stdout, then.stderr


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    started = tmp_path / "started"
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, time
from pathlib import Path
from minipar.comm import main
from minipar.train import trainer
from minipar.train.__main__ import run

def endless(self, index):
    if self.mesh.world.rank == 1:
        Path({str(started)!r}).touch()
    time.sleep(100)
trainer.Trainer.step = endless
sys.argv[1:] = {[*TRAIN[2:], "--save", str(tmp_path / "run")]!r}
main(run)
""")
    result = interrupt_mpi(3, [str(script)], started.exists, timeout=30, number=signal.SIGTERM, rank=1, times=2)
    assert result.returncode == signal.SIGTERM
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["minipar.lock"]  # which locks nothing any more


def test_without_save_a_signal_ends_the_training_at_once(tmp_path):
    metrics = tmp_path / "m.jsonl"
    flags = [*LONG, "--metrics", str(metrics)]
    result = interrupt_mpi(3, flags, lambda: lines(metrics) >= 2, number=signal.SIGTERM, rank=1)
    assert result.returncode == signal.SIGTERM and "saved" not in result.stdout


def test_handlers_are_those_of_before_outside_the_training():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with noting_signals(False) as noted:
        assert [signal.getsignal(number) for number in numbers] == before
    with noting_signals(True) as noted:
        assert [signal.getsignal(number) for number in numbers] != before and list(noted) == []
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_after_the_last_step_still_ends_the_run():
    """... and one that the training has answered does not come again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt), noting_signals(True) as noted:
            signal.raise_signal(signal.SIGINT)
            assert noted == [signal.SIGINT]
        with pytest.raises(SystemExit), noting_signals(True):
            signal.raise_signal(signal.SIGINT)
            raise SystemExit(130)
    finally:
        signal.signal(signal.SIGINT, before)
