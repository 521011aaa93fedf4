"""Claims about overflows: one rank's stops the run or skips the step on all of them; the loss scale of fp16 follows."""

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from combinations import TEXT, config_of
from training import bits, kind_of, on_each_rank, ranks_of, reports, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.more.precision import GOOD_STEPS
from minipar.train import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
RUN = "--layers 4 --steps 3 --lr 1e-2"
SCALE = 65536.0  # of the first step


class Overflow:
    """A part of a trainer whose own gradient on one rank overflows in some steps, before it is summed."""

    where: int
    bad: Sequence[int]

    def run_schedule(self, step, replica):
        overflows = step in self.bad and self.mesh.world.rank == self.where
        if overflows:
            self.loss_factor = np.inf
        losses = super().run_schedule(step, replica)
        if overflows and self.pipeline is not None:  # only the last stage multiplies by the factor
            self.ddp.parameters()[0].grad[...] = np.inf
        return losses


def overflowing(args, where, bad=(1,)):
    """Return a trainer of these flags that overflows on rank `where` in the steps `bad`."""
    return type("Overflowing", (Overflow, kind_of(args)), {"where": where, "bad": bad})


AXES = {
    "dp": "--dp 2",
    "zero": "--dp 2 --zero-stage 2",
    "cp": "--cp 2",
    "tp": "--tp 2",
    "pp": "--pp 2 --microbatches 2",
    "ep": "--dp 2 --ep 2 --model mixtral --experts 4",
}


# ---- fp16 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("axis", AXES)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(axis, where):
    args = config_of(f"{RUN} {AXES[axis]} --dtype float16")
    kind = overflowing(args, where)

    def rank(comm):
        trainer, states = trainer_for(args, TEXT, comm, kind), []
        for result in trainer.train():
            states.append([p.data.tobytes() for p in trainer.ddp.parameters()])
            assert math.isfinite(result.grad_norm) == (result.step != 1)
        assert trainer.scale.values == {"factor": SCALE / 2, "good_steps": 1, "skipped": 1}
        assert trainer.optimizer.steps == 2
        return states[0] == states[1] != states[2]

    assert all(run_local(ranks_of(args), rank))


def test_a_scale_below_1_ends_the_run():
    """16 overflows in a row have brought it from 2^16 to 1; the next one is a training that diverges."""
    args = config_of(f"{RUN} --dp 2 --dtype float16 --steps 40")
    with pytest.raises(UsageError, match=r"step 17 \(rank 0, "):
        on_each_rank(args, TEXT, lambda *_: None, overflowing(args, 0, range(100)))


def test_the_scale_starts_at_2_to_the_16_and_doubles_after_2000():
    """The figures of docs/command-line.md, of which the other tests use the names."""
    assert GOOD_STEPS == 2000
    trainer = trainer_for(config_of(f"{RUN} --dtype float16"), TEXT)
    trainer.scale.values["good_steps"] = GOOD_STEPS - 2
    scales = [trainer.scale.factor]
    for step in range(3):
        trainer.step(step)
        scales.append(trainer.scale.factor)
    assert scales == [65536.0, 65536.0, 131072.0, 131072.0] and trainer.scale.values["good_steps"] == 1


@pytest.mark.parametrize("model", ["", "--model mixtral --aux-loss 1"])
def test_the_scale_changes_no_gradient(model):
    """It is a power of two; without it, fp16 loses gradients below 2^-24."""
    states = []
    for factor in (SCALE, SCALE / 2):
        trainer = trainer_for(config_of(f"{RUN} --dtype float16 {model}"), TEXT)
        trainer.scale.values["factor"] = factor
        trainer.step(0)
        states.append([p.grad.astype("float32") for p in trainer.ddp.parameters()])
    assert all(np.allclose(a, b, rtol=2**-9, atol=1e-9) for a, b in zip(*states, strict=True))


def test_a_resumed_run_goes_on_counting_skipped_steps(tmp_path):
    """Twice: the count of the second checkpoint has that of the first."""
    skipped = []
    for first, steps in ((0, 3), (3, 4), (4, 6)):
        resume = f"--resume {tmp_path}" if first else ""
        args = config_of(f"{RUN} --dp 2 --dtype float16 {resume} --steps {steps}")

        def count(trainer, results, steps=steps):
            checkpoint.save(trainer, tmp_path, steps)
            return trainer.scale.values["skipped"]

        skipped.append(on_each_rank(args, TEXT, count, overflowing(args, 1, (1, 2, 3, 5)))[0])
    assert skipped == [2, 3, 4]


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 2", "--pp 2 --microbatches 2", "--dp 3"])
def test_a_run_resumed_after_a_skipped_step_never_stopped(layout, tmp_path):
    """AdamW counts updates, not steps: the third step is the second update, of the resumed run too."""
    flags = f"{RUN} {layout} --dtype float16 --steps 5"
    args = config_of(flags)
    kind = overflowing(args, 1)
    whole = on_each_rank(args, TEXT, seen, kind)[0]
    on_each_rank(config_of(f"{flags} --steps 3"), TEXT, lambda trainer, _: checkpoint.save(trainer, tmp_path, 3), kind)
    state, later, numbers = on_each_rank(config_of(f"{flags} --resume {tmp_path}"), TEXT, seen)[0]
    assert (state, later, numbers) == (whole[0], whole[1][3:], whole[2])
    assert numbers == (4, {"factor": SCALE / 2, "good_steps": 3, "skipped": 1})


def seen(trainer, results):
    """The bits of the parameters, losses and norms, and all that is counted."""
    return bits(trainer.state_dict()), reports(results), (trainer.optimizer.steps, trainer.scale.values)


# ---- other dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", AXES)
def test_a_gradient_that_is_not_finite_is_named(axis, dtype):
    args = config_of(f"{RUN} {AXES[axis]} --dtype {dtype}")
    with pytest.raises(UsageError) as stopped:
        on_each_rank(args, TEXT, lambda *_: None, overflowing(args, 1))
    assert re.search(r"step 2 \(rank [01], \S+\.(weight|bias)\).* norm (inf|nan)", str(stopped.value))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_alone_ends_the_run(bad):
    trainer = trainer_for(config_of(RUN), TEXT)
    trainer.gradient(0)
    with pytest.raises(UsageError, match="loss alone"):
        trainer.update(0, bad)
    assert trainer.optimizer.steps == 0


def test_the_first_rank_and_parameter_not_finite_are_named():
    def rank(comm):
        trainer = trainer_for(config_of(f"{RUN} --dp 3 --global-batch 6"), TEXT, comm)
        for number, p in enumerate(trainer.optimizer.parameters):
            p.grad = np.full(p.shape, np.nan if comm.rank > 0 and number > 1 else 1.0)
        trainer.handle_not_finite(4, 3.0, math.nan)

    with pytest.raises(UsageError, match=r"step 5 \(rank 1, ln_f\.weight\).* 3, .* nan"):
        run_local(3, rank)
