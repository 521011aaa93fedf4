"""A save that is stopped before any line of it leaves a whole checkpoint, and the next save goes on from there."""

import inspect
import itertools
import shutil
import sys

import numpy as np
from training import config_for, open_checkpoint, trainer_for

from minipar.comm import serial
from minipar.train.checkpoint import save
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
