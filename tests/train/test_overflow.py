"""Claims about overflows: one rank's stops or skips the step on all of them, and the loss scale of fp16 follows."""

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import bits, on_each_rank, ranks_of, reports, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train.__main__ import train
from minipar.train.precision import GOOD_STEPS, LOSS_SCALE, LossScaler, is_finite, refuse_divergence
from minipar.train.progress import Metrics, Progress
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
RUN = "--layers 4 --steps 3 --lr 1e-2"


class Overflowing(Trainer):
    """A trainer whose own gradient on one rank overflows in step 1: before it is summed, if there is no pipeline."""

    where: int
    bad: Sequence[int] = (1,)  # steps

    def backward_microbatch(self, step, replica, microbatch):
        scale = self.scaler.scale
        self.scaler.scale = np.inf if step in self.bad and self.mesh.world.rank == self.where else scale
        loss = super().backward_microbatch(step, replica, microbatch)
        self.scaler.scale = scale
        return loss

    def _pipeline_backward(self, step):
        loss = super()._pipeline_backward(step)
        if step == 1 and self.mesh.world.rank == self.where:
            self.ddp.parameters()[0].grad[...] = np.inf
        return loss


AXES = {
    "dp": "--dp 2",
    "zero": "--dp 2 --zero-stage 2",
    "cp": "--cp 2",
    "tp": "--tp 2",
    "pp": "--pp 2 --microbatches 2",
    "ep": "--dp 2 --ep 2 --model mixtral --experts 4",
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("axis", AXES)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(axis, where):
    config = config_of(f"{RUN} {AXES[axis]} --dtype fp16")
    kind = type("Overflowing", (Overflowing,), {"where": where})

    def rank(comm):
        trainer, states = trainer_for(config, TEXT, comm, kind), []
        for result in trainer.train():
            states.append([p.data.tobytes() for p in trainer.ddp.parameters()])
            assert result.skipped == (result.step >= 1)
        assert trainer.scaler.scale == LOSS_SCALE / 2 and trainer.optimizer.steps == 2
        return states[0] == states[1] != states[2]

    assert all(run_local(ranks_of(config), rank))


def test_a_scale_below_1_ends_the_run():
    """16 overflows in a row have brought it from 2^16 to 1; the next one is a training that diverges."""
    kind = type("Overflowing", (Overflowing,), {"where": 0, "bad": range(100)})
    with pytest.raises(UsageError, match="training has diverged: loss .* in step 17: rank 0, .*"):
        on_each_rank(config_of(f"{RUN} --dp 2 --dtype fp16 --steps 40"), TEXT, lambda *_: None, kind)


def test_the_scale_starts_at_2_to_the_16_and_doubles_after_2000():
    """The figures of docs/command-line.md, of which the other tests use the names."""
    assert (LOSS_SCALE, GOOD_STEPS) == (65536.0, 2000)
    trainer = trainer_for(config_of(f"{RUN} --dtype fp16"), TEXT)
    trainer.scaler.good_steps = GOOD_STEPS - 2
    scales = [trainer.scaler.scale]
    for step in range(3):
        trainer.step(step)
        scales.append(trainer.scaler.scale)
    assert scales == [65536.0, 65536.0, 131072.0, 131072.0] and trainer.scaler.good_steps == 1
    assert trainer_for(config_of("--dtype bf16"), TEXT).scaler.scale == 1.0
    assert trainer_for(config_of(""), TEXT).scaler.scale == 1.0


def scaler_of(dtype, skip=False, **manifest):
    run = SimpleNamespace(dtype=dtype, skip_nonfinite=skip)
    return LossScaler(run, SimpleNamespace(manifest=manifest) if manifest else None)


def counts(scaler, *finite):
    """Whether the run goes on after each step, the scale, the good steps since, and the skipped ones."""
    return [(scaler.update(each), scaler.scale, scaler.good_steps, scaler.skipped) for each in finite]


def test_fp16_halves_its_scale_at_each_overflow_down_to_1():
    found = counts(scaler_of("float16", loss_scale=[4.0, 5]), True, False, False, False)
    assert found == [(True, 4.0, 6, 0), (True, 2.0, 0, 1), (True, 1.0, 0, 2), (False, 0.5, 0, 3)]


@pytest.mark.parametrize("skip", [False, True])
def test_other_dtypes_count_and_have_no_scale(skip):
    found = counts(scaler_of("float32", skip, loss_scale=[1.0, 1999]), True, True, False, True)
    assert found == [(True, 1.0, 2000, 0), (True, 1.0, 2001, 0), (skip, 1.0, 0, 1), (True, 1.0, 1, 1)]


def test_a_checkpoint_without_counts_starts_them_at_0():
    """An older version wrote none."""
    scaler = scaler_of("float16", step=3)
    assert (scaler.scale, scaler.good_steps, scaler.skipped) == (LOSS_SCALE, 0, 0)


def test_a_step_is_finite_if_its_loss_and_norm_are():
    for bad in (math.inf, -math.inf, math.nan):
        assert not is_finite(1.0, bad) and not is_finite(bad, 1.0)
    assert is_finite(0.0, 1e300)


@pytest.mark.parametrize("flags", ["--dtype fp16", "--skip-nonfinite"])
def test_a_skipped_step_is_not_saved_on_the_way(flags, tmp_path):
    """The third of four steps is skipped, so the last two that were saved are 2 and 4."""
    config = config_of(f"{RUN} --dp 2 {flags} --save {tmp_path} --save-every 1 --steps 4")
    kind = type("Overflowing", (Overflowing,), {"where": 1, "bad": (2,)})

    def rank(comm):
        train(trainer_for(config, TEXT, comm, kind), None, Metrics(None), [], Progress(4, None))

    run_local(2, rank)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("model", ["", "--model mixtral --aux-loss 1"])
def test_the_scale_changes_no_gradient(model):
    """It is a power of two; without it, fp16 loses gradients below 2^-24."""
    states = []
    for scale in (LOSS_SCALE, LOSS_SCALE / 2):
        trainer = trainer_for(config_of(f"{RUN} --dtype fp16 {model}"), TEXT)
        trainer.scaler.scale = scale
        trainer.step(0)
        states.append([p.grad.astype("float32") for p in trainer.ddp.parameters()])
    assert all(np.allclose(a, b, rtol=2**-9, atol=1e-9) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("flags", ["--dtype fp16", "--skip-nonfinite"])
def test_a_resumed_run_goes_on_counting_skipped_steps(flags, tmp_path):
    """Twice: the count of the second checkpoint has that of the first."""
    kind = type("Overflowing", (Overflowing,), {"where": 1, "bad": (1, 2, 3, 5)})
    skipped = []
    for first, steps in ((0, 3), (3, 4), (4, 6)):
        resume = f"--resume {tmp_path}" if first else ""
        config = config_of(f"{RUN} --dp 2 {flags} {resume} --steps {steps}")

        def counted(trainer, results, steps=steps):
            trainer.save(tmp_path, steps)
            return [result.skipped for result in results]

        skipped += on_each_rank(config, TEXT, counted, kind)[0]
    assert skipped == [0, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 2", "--pp 2 --microbatches 2", "--dp 3"])
@pytest.mark.parametrize("dtype", ["--dtype fp16", "--skip-nonfinite"])
def test_a_run_resumed_after_a_skipped_step_never_stopped(dtype, layout, tmp_path):
    """AdamW counts updates, not steps: the third step is the second update, of the resumed run too."""
    flags = f"{layout} {dtype} --steps 5"
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    whole = on_each_rank(config_of(f"{RUN} {flags}"), TEXT, seen, kind)[0]
    saved = config_of(f"{RUN} {flags} --steps 3")
    on_each_rank(saved, TEXT, lambda trainer, _: trainer.save(tmp_path, 3), kind)
    state, later, numbers = on_each_rank(config_of(f"{RUN} {flags} --resume {tmp_path}"), TEXT, seen)[0]
    assert (state, later, numbers) == (whole[0], whole[1][3:], whole[2])
    assert numbers[:2] == (4, 1)  # updates, skipped steps


def seen(trainer, results):
    """The bits of the parameters, losses and norms, and all that is counted."""
    scaler = trainer.scaler
    numbers = trainer.optimizer.steps, scaler.skipped, scaler.scale, scaler.good_steps
    return bits(trainer.state_dict()), reports(results), numbers


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("axis", AXES)
def test_a_gradient_that_is_not_finite_is_named(axis, dtype):
    config = config_of(f"{RUN} {AXES[axis]} --dtype {dtype}")
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    with pytest.raises(UsageError) as stopped:
        on_each_rank(config, TEXT, lambda *_: None, kind)
    assert re.search(r"gradient norm (inf|nan) in step 2: rank [01], \S+\.(weight|bias); try", str(stopped.value))


def test_skip_nonfinite_skips_in_any_precision():
    config = config_of(f"{RUN} --dp 2 --zero-stage 2 --skip-nonfinite")
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    results = on_each_rank(config, TEXT, lambda _, results: results, kind)[0]
    assert [result.skipped for result in results] == [0, 1, 1] and not math.isfinite(results[1].grad_norm)


def test_the_first_rank_and_parameter_not_finite_are_named():
    def rank(comm):
        trainer = trainer_for(config_of(f"{RUN} --dp 3 --global-batch 6"), TEXT, comm)
        parameters = trainer.optimizer.parameters
        for number, p in enumerate(parameters):
            p.grad = np.full(p.shape, np.nan if comm.rank > 0 and number > 1 else 1.0)
        refuse_divergence(comm, parameters, 4, 3.0, math.nan, 0.1)

    with pytest.raises(UsageError, match=r"loss 3 and gradient norm nan in step 5: rank 1, ln_f\.weight"):
        run_local(3, rank)
