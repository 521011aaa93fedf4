"""Claims about a run that is killed: whatever the moment, a whole checkpoint is there and the run goes on from it."""

import inspect
import itertools
import json
import shutil
import signal
import sys
import time

import numpy as np
from launcher import interrupt_mpi, kill_mpi, run_mpi
from training import config_for, open_checkpoint, trainer_for

from minipar.comm import serial
from minipar.train.checkpoint import checkpoints, save
from minipar.train.data import Tokens

TINY = "--layers 1 --hidden 4 --heads 1 --seq-len 8 --global-batch 2 --steps 3 --vocab-size 16"
SAVE_FILE = inspect.getfile(save)
TOKENS = Tokens(np.arange(100, dtype=np.uint8) % 16, "a text", 16)


class Killed(BaseException):
    """No handler of errors sees it."""


def killed_at_line(number, function, *args):
    """Call the function and stop before the number-th line that runs in checkpoint.py; False if it has fewer."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_code.co_filename != SAVE_FILE or frame.f_code.co_name == "_owned_tensors":
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Killed
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    except Killed:
        return True
    finally:
        sys.settrace(previous)
    return False


def test_a_save_stopped_at_any_line_leaves_a_whole_checkpoint(tmp_path):
    """Two checkpoints are there and the third is being written, which then removes the first."""
    trainer = trainer_for(config_for(TINY), TOKENS)
    for result in trainer.train():
        if result.step < 2:
            trainer.save(tmp_path / "two", result.step + 1)
    newest = []
    for line in itertools.count(1):
        folder = tmp_path / str(line)
        shutil.copytree(tmp_path / "two", folder)
        stopped = killed_at_line(line, trainer.save, folder, 3)
        resumed = config_for(f"{TINY} --resume {folder}")
        newest.append(open_checkpoint(resumed, TOKENS, serial()).step)
        if not stopped:
            break
        if newest[-1] == 2:
            trainer.save(folder, 3)
            assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert newest == sorted(newest) and len(newest) > 40 and newest.count(3) > 10  # the new one counts from one line on


KILLED = (
    "--layers 4 --hidden 20 --heads 4 --seq-len 8 --vocab-size 257 --dtype float64 --dropout 0.1 --global-batch 12 "
    "--steps 100000 --reduction ordered --clip-grad 1 --dp 2 --zero-stage 1"
).split()


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(tmp_path):
    """SIGKILL for all ranks and mpirun: in the middle of a save (files half written, all written, the manifest there),
    between two steps, and at random; each time the next start finds a whole checkpoint that is not an older one."""
    folder, random = tmp_path / "run", np.random.default_rng(0)
    flags = ["-m", "minipar.train", *KILLED, "--save", str(folder), "--save-every", "1"]

    def seen(pattern, after):
        """True once a file like this is there and `after` checkpoints of this start have been finished."""
        return lambda: newest() >= before + after and any(folder.glob(pattern))

    def newest():
        return max((step for step, _ in checkpoints(folder)), default=0) if folder.is_dir() else 0

    def at_random(seconds):
        start = []
        return lambda: (
            newest() > before
            and (start or start.append(time.monotonic()) or start)
            and (time.monotonic() > start[0] + seconds)
        )

    before, moments = 0, 0
    kinds = ["*.partial", "*.partial/rank-00001.safetensors", "*.partial/manifest.json", None, None]
    for kind in kinds:
        moment = at_random(random.uniform(0, 0.2)) if kind is None else seen(kind, 2)
        resume = ["--resume", str(folder)] if before else []
        ended = kill_mpi(2, [*flags, *resume], moment)
        assert ended is None, f"the run ended before it was killed: {ended}"
        moments += any(folder.glob("*.partial"))
        assert newest() > before
        before = newest()
    assert moments >= 2, "no save was interrupted"
    end = ["--resume", str(folder), "--steps", str(before + 3), "--verify"]
    result = run_mpi(2, [*flags, *end], timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {before} from {folder}" in result.stdout
    assert "verify: 2 ranks = 1 device, bit for bit: loss, norm, gradients and updates of 52" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{before + i:08d}" for i in (2, 3)]


def test_one_command_continues_on_the_ranks_that_are_left(tmp_path):
    """4 ranks, of which one is killed, then 3, of which one is killed, then 2: the run of one device, within bounds."""
    folder, metrics = tmp_path / "run", tmp_path / "m.jsonl"
    shape = "--layers 2 --hidden 20 --heads 4 --seq-len 8 --vocab-size 257 --dtype float64 --global-batch 12"
    flags = f"{shape} --zero-stage 1 --steps 60 --save {folder} --save-every 1 --resume auto --metrics {metrics}"
    command = ["-m", "minipar.train", *flags.split()]

    def newest():
        return max((step for step, _ in checkpoints(folder)), default=0) if folder.is_dir() else 0

    for ranks in (4, 3):
        before = newest()
        ended = interrupt_mpi(ranks, command, lambda b=before: newest() >= b + 2, number=signal.SIGKILL, rank=1)
        assert ended.returncode == signal.SIGKILL and before + 2 <= newest() < 60
        assert ("resumed after step" in ended.stdout) == (before > 0) and f": --dp {ranks} " in ended.stdout
    before = newest()
    result = run_mpi(2, [*command, "--verify"])
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {before} from {folder}" in result.stdout and ": --dp 2 " in result.stdout
    assert "verify: 2 ranks = 1 device" in result.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(60))
