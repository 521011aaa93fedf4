"""Checkpoints between minipar and torch: FSDP2 resumes minipar's, from any layout, and minipar starts from FSDP2's.

torch's two processes talk over gloo; minipar's ranks are threads. The loss, the gradient norm before clipping and every
parameter after the next step are compared, relative to the array's largest element.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from launcher import run_mpi
from training import config_for, on_each_rank

from chapters.support.whole_runs import relative_difference
from minipar.train.checkpoint import save
from minipar.train.data import Batches, Tokens

VOCAB, LENGTH, HIDDEN, BATCH, SAVED = 65, 8, 20, 8, 3  # ranks share the vocabulary unequally
SHAPE = f"--layers 2 --hidden {HIDDEN} --heads 4 --vocab-size {VOCAB}"
CHECKPOINT = f"step-{SAVED:08d}"
# A keys' bias has no gradient but rounding, which AdamW divides by eps: see tests/helpers/tensor_cases.py.
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5, "clip": 0.25}
TEXT = Tokens(np.random.Generator(np.random.Philox(43)).integers(0, VOCAB, 500).astype(np.uint8), "random text")
LAYOUTS = {
    "1-rank": "",
    "stage-0": "--dp 2 --tp 2 --pp 2 --microbatches 2",
    "stage-1": "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 1 --sequence-parallel",
    "stage-2": "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 2 --schedule zb-h1",
    "stage-3": "--dp 2 --tp 2 --pp 2 --microbatches 2 --zero-stage 3",
    "tp-4": "--dp 2 --tp 4 --zero-stage 3",
}


def train(flags, steps):
    """Train with minipar on threads, and save if --save is among the flags; return the last step's result."""
    config = config_for(
        f"--seq-len {LENGTH} --global-batch {BATCH} --steps {steps} --dtype float64 --order sequential "
        f"--lr {SETTINGS['lr']} --eps {SETTINGS['eps']} --weight-decay {SETTINGS['weight_decay']} "
        f"--clip-grad {SETTINGS['clip']} {flags}"
    )

    def last(trainer, results):
        if config.save:
            save(trainer, config.save, steps)
        return {"loss": results[-1].loss, "norm": results[-1].grad_norm} | trainer.state_dict()

    return on_each_rank(config, TEXT, last)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a directory for each layout, which has minipar's checkpoint after SAVED steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, flags in LAYOUTS.items():
        train(f"{SHAPE} --save {folder / name} {flags}", SAVED)
    return folder


@pytest.fixture(scope="module")
def in_torch(folder):
    """The folder, after torch's two processes have taken their steps of every case."""
    batches = Batches(TEXT, LENGTH, BATCH, "sequential", seed=0)
    resumed, first = (batches.batch(step, range(BATCH)) for step in (SAVED, 0))
    np.savez(folder / "batches.npz", resumed=resumed, written=first)
    job = {"settings": SETTINGS, "checkpoint": CHECKPOINT, "cases": list(LAYOUTS)}
    (folder / "job.json").write_text(json.dumps(job))
    result = run_mpi(2, [str(Path(__file__).with_name("torch_resume.py")), str(folder)], timeout=200)
    assert result.returncode == 0, result.stderr
    return folder


def differences(ours, file, key):
    """Return the difference of each of torch's values of a step that is not minipar's within 1e-12."""
    theirs = {name.removeprefix(f"{key}/"): array for name, array in np.load(file).items() if name.startswith(key)}
    assert theirs.keys() == ours.keys()
    relative = {name: relative_difference(theirs[name], np.asarray(value)) for name, value in ours.items()}
    return {name: difference for name, difference in relative.items() if not difference <= 1e-12}  # nan is one too


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fsdp2_takes_the_next_step_of_a_checkpoint(layout, in_torch):
    ours = train(f"{SHAPE} --resume {in_torch / layout} {LAYOUTS[layout]}", SAVED + 1)
    assert ours["norm"] > SETTINGS["clip"], "clipping did not happen"
    assert differences(ours, in_torch / f"{layout}.npz", "resumed") == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_minipar_starts_from_what_fsdp2_has_written(layout, in_torch):
    ours = train(f"--init-from {in_torch / layout / 'written'} {LAYOUTS[layout]}", 1)
    assert differences(ours, in_torch / f"{layout}.npz", "written") == {}
