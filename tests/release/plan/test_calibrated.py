"""The planner against minipar's own runs: time on the `cpu` clock, memory in the ledger.

`recorded/calibration.json` holds what the third edition's `mpirun -n 8 python -m minipar.bench machine` and `layouts`
measured on a quiet machine with 2 cores: the constants, and 28 layouts of one model. What the planner says of them is
computed here; measuring again is the bench's business, since no timed test is a test. Memory is measured here.

The picture of the record: PYTHONPATH=. python tests/release/plan/test_calibrated.py visualize/gallery/layouts.png
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from minipar.bench import layouts as bench
from minipar.bench.costs import PIECES, Machine
from minipar.bench.pipeline import random_tokens
from minipar.comm import DeviceMesh, Network, run_local
from minipar.memory import MemoryLedger
from minipar.plan.rank_bytes import memory
from minipar.train.trainer import Trainer
from visualize import plot_agreement
from visualize.style import save

RECORD = json.loads((Path(__file__).parent / "recorded" / "calibration.json").read_text())


def machine_of(constants):
    known = constants | {"seconds_per_flop": 1 / constants["flops_per_second"]}
    costs = {name: known[name] for piece in PIECES.values() for name in piece}
    return Machine(costs, Network(constants["message_alpha"], constants["message_beta"]))


def predicted_rows(machine):
    sizes = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in RECORD["model"].items())
    rows = []
    for row, args in zip(RECORD["layouts"], bench.runs_of(sizes, 8), strict=True):
        time, held = bench.predict(args, machine)
        measured = bench.row_of(args, np.array([row["seconds"]]), row["peak_bytes"])
        rows.append(measured | {"predicted_seconds": time.total, "predicted_bytes": held.total})
    return rows


def test_step_times_agree_within_20_percent_and_in_order():
    result = bench.agreement(predicted_rows(machine_of(RECORD["constants"])))
    assert result.largest < 0.20 and result.median < 0.10 and result.spearman >= 0.9
    assert result.memory_largest < 0.10


@pytest.mark.parametrize("wrong", ["flops_per_second", "forward_byte", "message_beta"])
def test_with_a_constant_wrong_by_four_they_disagree(wrong):
    """The claim above can fail."""
    constants = RECORD["constants"] | {wrong: RECORD["constants"][wrong] * (0.25 if wrong[:5] == "flops" else 4)}
    result = bench.agreement(predicted_rows(machine_of(constants)))
    assert result.largest > 0.20


@pytest.mark.parametrize("which", range(len(bench.LAYOUTS)), ids=[flags or "one device" for flags in bench.LAYOUTS])
def test_memory_is_within_10_percent_of_the_ledger(which):
    sizes = "--layers 8 --hidden 64 --heads 8 --seq-len 32 --vocab-size 64 --global-batch 32"
    args = bench.runs_of(sizes, 8)[which]

    def peak(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = Trainer(args, DeviceMesh(comm, tp=args.tp, pp=args.pp), random_tokens(args))
            for step in range(bench.RECORDED):
                trainer.step(step)
        return ledger.peak

    predicted = memory(bench.shape_of(args), bench.layout_of(args), 32, bench.framework_of(args)).total
    assert predicted == pytest.approx(max(run_local(bench.layout_of(args).gpus, peak)), rel=0.10)


if __name__ == "__main__":
    compared = predicted_rows(machine_of(RECORD["constants"]))
    save(plot_agreement(compared), sys.argv[1])
    print(f"{len(compared)} layouts: {bench.agreement(compared)}")
