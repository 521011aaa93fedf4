"""A save that is killed at any of its file operations leaves a whole checkpoint, from which the next run goes on."""

import itertools
import os
import shutil
import sys

import numpy as np
from training import bits, config_for, trainer_for

from minipar.train import checkpoint
from minipar.train.data import Tokens

TINY = "--layers 1 --hidden 4 --heads 1 --seq-len 8 --global-batch 2 --steps 4 --vocab-size 16"
TOKENS = Tokens(np.arange(100, dtype=np.uint8) % 16, "a text")
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
LEFT: list[int] = []  # file operations until the process is killed; empty: it is not


class Killed(BaseException):
    """No handler of errors sees it."""


def count(event, args):
    """Kill the process, so to speak, before the file operation that LEFT says."""
    if LEFT and event in OPERATIONS:
        LEFT[0] -= 1
        if LEFT[0] == 0:
            LEFT.clear()
            raise Killed


sys.addaudithook(count)  # there is no way to remove it; it does nothing while LEFT is empty


def killed_at(number, trainer, folder):
    """Save step 3 and stop before the number-th file operation, the last file half written; False if it has fewer."""
    LEFT[:] = [number]
    try:
        checkpoint.save(trainer, str(folder), 3)
    except Killed:
        written = sorted(folder.glob("*.partial/**/*.*"), key=os.path.getmtime)
        for path in written[-1:]:
            os.truncate(path, path.stat().st_size // 2)
        return True
    finally:
        LEFT.clear()
    return False


def state(trainer):
    """All that a step changes."""
    kinds = checkpoint.states_of(trainer).items()
    return bits({f"{kind} {i}": array for kind, arrays in kinds for i, array in arrays.items()})


def test_a_save_killed_at_any_operation_leaves_a_whole_one(tmp_path):
    """Two checkpoints are there and the third is being written."""
    trainer = trainer_for(config_for(TINY), TOKENS)
    states = {}
    for result in trainer.train():
        states[result.step + 1] = state(trainer)
        checkpoint.save(trainer, str(tmp_path / "all"), result.step + 1)
        if result.step == 1:
            shutil.copytree(tmp_path / "all", tmp_path / "two")
    third = trainer_for(config_for(f"{TINY} --resume {tmp_path / 'all/step-00000003'}"), TOKENS)
    newest = []
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "two", folder, copy_function=os.link)
        stopped = killed_at(number, third, folder)
        resumed = trainer_for(config_for(f"{TINY} --resume {folder}"), TOKENS)
        newest.append(resumed.first_step)
        assert state(resumed) == states[newest[-1]]
        if not stopped:
            break
        if number % 5 == 1:  # the save takes most of the time
            resumed.step(newest[-1])
            assert state(resumed) == states[newest[-1] + 1]
            checkpoint.save(resumed, str(folder), newest[-1] + 1)
            kept = [f"step-{step:08d}" for step in range(1, newest[-1] + 2)]
            assert sorted(path.name for path in folder.iterdir()) == kept
        shutil.rmtree(folder)
    assert newest == sorted(newest) and newest.count(2) > 40 and newest.count(3) == 1  # whole once it is renamed
