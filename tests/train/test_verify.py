"""Claims about `--verify`: it passes what is right in every layout, and sees each of these mistakes.

tests/release/train/test_verify.py plants them in more layouts and steps.
"""

import numpy as np
import pytest
from combinations import TEXT
from mistakes_in_training import MISTAKES, gradient_times, overriding
from refusals import refused
from training import config_for, kind_of, run_until, trainer_for, verdicts

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train import checkpoint, verify

RUN = "--layers 4 --hidden 16 --heads 4 --seq-len 8 --vocab-size 16 --global-batch 8 --steps 2 --dtype float64"
BITS = "bit for bit"
WITHIN = "the bound is 1e-09"


def verdict_of(flags, kind=None):
    """The verdict on a run, which every rank hears alike."""
    found = {(verdict.passed, verdict.line) for verdict in verdicts(config_for(f"{RUN} {flags} --verify"), TEXT, kind)}
    assert len(found) == 1
    return verify.Verdict(*found.pop())


RIGHT = [
    ("--dp 4", WITHIN),
    ("--dp 4 --reduction ordered", BITS),
    ("--dp 2 --zero-stage 2 --reduction ordered --clip-grad 0.1 --dtype bfloat16", BITS),
    ("--dp 4 --zero-stage 3 --microbatches 2 --reduction ordered --dropout 0.1 --dtype float32", BITS),
    ("--pp 2 --dp 2 --microbatches 4 --schedule zbv --reduction ordered --recompute full --dtype float16", BITS),
    ("--model llama --pp 2 --microbatches 4 --reduction ordered --dtype float32", BITS),
    ("--tp 2 --dp 2 --zero-stage 3 --reduction tree --dtype float32", BITS),
    ("--model llama --tp 2 --pp 2 --microbatches 2 --reduction tree --dtype float32", BITS),
    ("--dp 4 --zero-stage 2 --zero-replicas 2 --reduction ordered", WITHIN),
    ("--dp 4 --zero-stage 3 --microbatches 2 --sync-every-microbatch --reduction ordered", WITHIN),
    ("--tp 2 --lr 0.1 --reduction ordered", WITHIN),
    ("--tp 2 --sequence-parallel --dp 2 --zero-stage 1", WITHIN),
    ("--cp 2 --context-parallel ulysses --tp 2", WITHIN),
    ("--model llama --cp 2 --pp 2 --schedule interleaved-1f1b --microbatches 2", WITHIN),
    ("--model mixtral --dp 2 --ep 2 --zero-stage 2", WITHIN),
]


@pytest.mark.parametrize(("flags", "how"), RIGHT)
def test_a_right_run_passes(flags, how):
    verdict = verdict_of(flags)
    assert verdict.passed and how in verdict.line, verdict.line


@pytest.mark.parametrize("flags", ["--tp 2", "--dp 2", "--cp 2 --reduction ordered", "--model mixtral --ep 2 --dp 2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_no_dtype_but_float64_proves_is_refused(dtype, flags):
    refused(UsageError, "--verify", dtype, "--dtype float64", by=lambda: verdict_of(f"{flags} --dtype {dtype}"))


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_in_what_it_changes_first(name):
    flags, kind, where = MISTAKES[name]
    verdict = verdict_of(flags, kind)
    assert not verdict.passed and f" {where};" in verdict.line, verdict.line


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 3", "--tp 2", "--pp 2 --microbatches 4"])
def test_a_thousandth_is_seen(layout):
    assert not verdict_of(layout, gradient_times(1.001)).passed


@pytest.mark.parametrize("flags", ["--dp 2 --reduction ordered", "--tp 2 --reduction tree"])
def test_one_ulp_is_seen_where_bits_are_promised(flags):
    def nudge(self, right, step):
        result = right(step)
        first = self.optimizer.values()[0].reshape(-1)
        first[0] = np.nextafter(first[0], first.dtype.type(9))
        return result

    config = config_for(f"{RUN} {flags} --dtype float32 --steps 1")
    kind = overriding("step", nudge, kind_of(config))
    verdict = verdicts(config, TEXT, kind)[0]
    assert not verdict.passed and "bits are promised" in verdict.line, verdict.line


def spoilt(trainer):
    """Make one value of the last parameter NaN."""
    trainer.ddp.parameters()[-1].data.reshape(-1)[-1:] = np.nan


@pytest.mark.parametrize("flags", ["--dp 2 --zero-stage 3", "--tp 2", "--dp 2 --reduction ordered --dtype float32"])
@pytest.mark.parametrize("where", ["the ranks", "one device", "both", "a loss", "both losses"])
def test_what_is_not_a_number_fails(where, flags, monkeypatch):
    """... in parameters after the last step, where no loss shows it, and in a loss; also where both have it."""
    single = verify.one_device

    def device(args, tokens):
        alone = single(args, tokens)
        right = alone.train

        def train():
            results = list(right())
            if where in ("one device", "both"):
                spoilt(alone)
            return [lost(result) for result in results] if where == "both losses" else results

        alone.train = train
        return alone

    def lost(result):
        return type(result)(result.step, np.nan, result.grad_norm)

    def rank(comm):
        trainer = trainer_for(config_for(f"{RUN} {flags} --steps 1"), TEXT, comm)
        results = list(trainer.train())
        if where in ("the ranks", "both"):
            spoilt(trainer)
        if "loss" in where:
            results = [lost(result) for result in results]
        return verify.verify(trainer, results)

    monkeypatch.setattr(verify, "one_device", device)
    for verdict in run_local(2, rank):
        assert not verdict.passed and ("loss of step 1" in verdict.line) == ("loss" in where)


# ---- resumed runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 2 for each dtype, written by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for dtype in ("float64", "float32"):
        run_until(TEXT, config_for(f"{RUN} --dp 2 --zero-stage 1 --dtype {dtype} --steps 4"), folder / dtype, 2)
    return folder


RESUMED = [
    ("--dp 2 --zero-stage 1 --reduction ordered --dtype float32", BITS),
    ("--dp 4 --pp 2 --zero-stage 3 --reduction ordered --dtype float32", BITS),
    ("--tp 2 --sequence-parallel --dp 2", WITHIN),
]


def resumed(saved, flags):
    dtype = "float32" if "float32" in flags else "float64"
    return config_for(f"{RUN} {flags} --steps 4 --resume {saved / dtype}")


@pytest.mark.parametrize(("flags", "how"), RESUMED)
def test_a_right_resumed_run_passes(flags, how, saved):
    verdict = verdicts(resumed(saved, flags), TEXT)[0]
    assert verdict.passed and how in verdict.line, verdict.line


@pytest.mark.parametrize(("flags", "how"), RESUMED)
@pytest.mark.parametrize("kept", ["exp_avg", "exp_avg_sq", "steps"])
def test_state_that_is_not_resumed_is_seen(kept, flags, how, saved, monkeypatch):
    """A stale moment, or a stale count of steps, on the ranks. One device reads the checkpoint by itself."""
    right = checkpoint.resume

    def resume(trainer, directory):
        right(trainer, directory)
        if kept == "steps":
            trainer.optimizer.steps = 0
        else:
            for array in checkpoint.states_of(trainer)[kept].values():
                array[...] = 0

    monkeypatch.setattr(checkpoint, "resume", resume)
    verdict = verdicts(resumed(saved, flags), TEXT)[0]
    assert not verdict.passed


@pytest.mark.parametrize(("kind", "passed"), [(None, True), (gradient_times(1.01), False)])
def test_one_device_starts_where_the_run_did(kind, passed, tmp_path):
    """... also when newer steps are saved in the directory of `--resume`, where they take the place of older ones."""
    run_until(TEXT, config_for(f"{RUN} --dp 2 --steps 3"), tmp_path, 1)
    config = config_for(f"{RUN} --dp 2 --steps 6 --resume {tmp_path} --verify")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm, kind)
        results = []
        for result in trainer.train():
            results.append(result)
            checkpoint.save(trainer, str(tmp_path), result.step + 1)
        return verify.verify(trainer, results)

    assert [verdict.passed for verdict in run_local(2, rank)] == [passed] * 2
    kept = sorted(int(path.name[5:]) for path in tmp_path.iterdir())
    assert kept == [1, 2, 3, 4, 5, 6]
