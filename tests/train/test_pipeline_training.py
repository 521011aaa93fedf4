"""Claims about training through a pipeline: what a run holds, sends and takes is what its schedule says.

test_combinations.py has every schedule's bits.
"""

import numpy as np
import pytest
from combinations import TEXT, VOCAB, config_of
from training import trainer_for

from minipar.comm import run_local
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make

FOUR = "--pp 4 --microbatches 6 --global-batch 12 --layers 8 --hidden 16 --heads 2 --seq-len 8"


@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
def test_a_run_holds_and_sends_what_its_schedule_says(schedule, peaks):
    def rank(comm):
        trainer = trainer_for(config_of(f"{FOUR} --schedule {schedule}"), TEXT, comm)
        alive = []
        trainer.after_action = lambda action: alive.append(
            sum(len(stage.alive) for stage in trainer.executor.stages.values())
        )
        for _ in trainer.train():
            pass
        return max(alive), comm.traffic.bytes("send", "pp")

    alive, sent = zip(*run_local(4, rank), strict=True)
    assert list(alive) == peaks
    one_way = 2 * 8 * 16 * 8  # B T h elements of 8 bytes
    embedding = VOCAB * 16 * 8
    cuts = [6 * one_way, 2 * 6 * one_way, 2 * 6 * one_way, 6 * one_way]
    tied = [embedding, 0, 0, embedding]
    assert list(sent) == [2 * (cut + tie) for cut, tie in zip(cuts, tied, strict=True)]  # in two steps


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_on_the_model_clock_a_step_takes_the_simulated_time(schedule):
    """One block per stage; the head, which the last stage has besides, is made free. A pair's halves run one after the
    other, so the time of dualpipev is that of the same list without pairs.
    """
    layers = 8 if schedule in ("zbv", "dualpipev") else 4
    args = config_of(f"{FOUR} --microbatches 8 --global-batch 8 --layers {layers} --steps 1 --schedule {schedule}")

    def rank(comm):
        trainer = trainer_for(args, TEXT, comm)
        trainer.model.project = lambda x, weight: x + weight.sum()
        trainer.model.criterion = lambda x, targets: x.sum()
        trainer.step(0)
        return comm.clock.now() * comm.clock.flops_per_second

    forward = 24 * 8 * 16 * 16 + 4 * 8 * 8 * 16  # one sample, one block
    weights = 24 * 8 * 16 * 16
    durations = Durations(forward, 2 * forward - weights, weights)
    predicted = simulate(make(args.schedule, 4, args.microbatches, args.virtual_stages).unpaired(), durations).makespan
    assert predicted <= simulate(make(args.schedule, 4, args.microbatches, args.virtual_stages), durations).makespan
    assert max(run_local(4, rank, clock="model")) == pytest.approx(predicted, rel=1e-9)


def test_each_parameter_is_one_ranks():
    def rank(comm):
        trainer = trainer_for(config_of("--pp 3 --layers 8 --microbatches 3"), TEXT, comm)
        names = {p: name for name, p in trainer.model.named_parameters()}
        own = [names[p] for group in trainer.pipeline.groups for p in group]
        return own, bool(np.isnan(trainer.model.wpe.weight.data).all())

    owned = run_local(3, rank)
    everything = [name for names, _ in owned for name in names]
    assert len(everything) == len(set(everything)) == 4 + 8 * 12
    assert owned[0][0][:2] == ["wte.weight", "wpe.weight"] and owned[2][0][-1] == "ln_f.bias"
    assert [absent for _, absent in owned] == [False, True, True]  # what a rank does not have, it does not hold
