"""Claims about overflows: one rank's stops or skips the step on all of them, and the loss scale of fp16 follows."""

import json
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from training import config_for, on_each_rank, ranks_of, trainer_for

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.train.__main__ import train
from minipar.train.checkpoint import checksum
from minipar.train.precision import GOOD_STEPS, LOSS_SCALE, refuse_divergence
from minipar.train.progress import Metrics, Progress
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
SHAPE = f"--layers 4 --hidden 12 --heads 2 --seq-len 8 --vocab-size {VOCAB} --global-batch 8 --steps 3 --lr 1e-2"


def config_of(flags):
    return config_for(f"{SHAPE} {flags}")


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
    "ep": "--dp 2 --ep 2 --model mixtral",
}


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("axis", AXES)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(axis, where):
    config = config_of(f"{AXES[axis]} --dtype fp16")
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
        on_each_rank(config_of("--dp 2 --dtype fp16 --steps 40"), TEXT, lambda *_: None, kind)


def test_the_scale_doubles_after_enough_good_steps():
    trainer = trainer_for(config_of("--dtype fp16"), TEXT)
    trainer.scaler.good_steps = GOOD_STEPS - 2
    scales = [trainer.scaler.scale for step in range(3) for _ in [trainer.step(step)]]
    assert scales == [LOSS_SCALE, 2 * LOSS_SCALE, 2 * LOSS_SCALE] and trainer.scaler.good_steps == 1


def test_the_scale_starts_at_2_to_the_16_and_doubles_after_2000():
    """The figures of docs/command-line.md, of which the other tests use the names."""
    assert (LOSS_SCALE, GOOD_STEPS) == (65536.0, 2000)
    assert trainer_for(config_of("--dtype fp16"), TEXT).scaler.scale == 65536.0
    assert (
        trainer_for(config_of("--dtype bf16"), TEXT).scaler.scale
        == trainer_for(config_of(""), TEXT).scaler.scale
        == 1.0
    )


@pytest.mark.parametrize("flags", ["--dtype fp16", "--skip-nonfinite"])
def test_a_skipped_step_is_not_saved_on_the_way(flags, tmp_path):
    """Of four steps the third is skipped, so the last two that were saved are 2 and 4."""
    config = config_of(f"--dp 2 {flags} --save {tmp_path} --save-every 1 --steps 4")
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
        trainer = trainer_for(config_of(f"--dtype fp16 {model}"), TEXT)
        trainer.scaler.scale = scale
        trainer.step(0)
        states.append([p.grad.astype("float32") for p in trainer.ddp.parameters()])
    assert all(np.allclose(a, b, rtol=2**-9, atol=1e-9) for a, b in zip(*states, strict=True))


def test_a_resumed_run_keeps_its_loss_scale(tmp_path):
    config = config_of("--dp 2 --dtype fp16")
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    on_each_rank(config, TEXT, lambda trainer, _: trainer.save(tmp_path, 3), kind)
    config = config_of(f"--dp 2 --dtype fp16 --steps 4 --resume {tmp_path}")
    scales = on_each_rank(config, TEXT, lambda trainer, _: (trainer.scaler.scale, trainer.scaler.good_steps))
    assert scales == [(LOSS_SCALE / 2, 2)] * 2


@pytest.mark.parametrize("flags", ["--dtype fp16", "--skip-nonfinite"])
def test_a_resumed_run_goes_on_counting_skipped_steps(flags, tmp_path):
    """Twice: the count of the second checkpoint has that of the first."""
    kind = type("Overflowing", (Overflowing,), {"where": 1, "bad": (1, 2, 3, 5)})
    counts = []
    for first, steps in ((0, 3), (3, 4), (4, 6)):
        resume = f"--resume {tmp_path}" if first else ""
        config = config_of(f"--dp 2 {flags} {resume} --steps {steps}")

        def counted(trainer, results, steps=steps):
            trainer.save(tmp_path, steps)
            return [result.skipped for result in results]

        counts += on_each_rank(config, TEXT, counted, kind)[0]
    assert counts == [0, 1, 2, 3, 3, 4]


def test_an_older_checkpoint_starts_counting_at_0(tmp_path):
    on_each_rank(config_of("--dp 2 --dtype fp16"), TEXT, lambda trainer, _: trainer.save(tmp_path, 3))
    path = tmp_path / "step-00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["skipped"]
    path.write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))
    config = config_of(f"--dp 2 --dtype fp16 --steps 4 --resume {tmp_path}")
    assert on_each_rank(config, TEXT, lambda _, results: results[0].skipped) == [0, 0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("axis", AXES)
def test_a_gradient_that_is_not_finite_is_named(axis, dtype):
    config = config_of(f"{AXES[axis]} --dtype {dtype}")
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    with pytest.raises(UsageError) as stopped:
        on_each_rank(config, TEXT, lambda *_: None, kind)
    assert re.search(r"gradient norm (inf|nan) in step 2: rank [01], \S+\.(weight|bias); try", str(stopped.value))


def test_skip_nonfinite_skips_in_any_precision():
    config = config_of("--dp 2 --zero-stage 2 --skip-nonfinite")
    kind = type("Overflowing", (Overflowing,), {"where": 1})
    results = on_each_rank(config, TEXT, lambda _, results: results, kind)[0]
    assert [result.skipped for result in results] == [0, 1, 1] and not math.isfinite(results[1].grad_norm)


def test_the_first_rank_and_parameter_not_finite_are_named():
    def rank(comm):
        trainer = trainer_for(config_of("--dp 3 --global-batch 6"), TEXT, comm)
        parameters = trainer.optimizer.parameters
        for number, p in enumerate(parameters):
            p.grad = np.full(p.shape, np.nan if comm.rank > 0 and number > 1 else 1.0)
        refuse_divergence(comm, parameters, 4, 3.0, math.nan, 0.1)

    with pytest.raises(UsageError, match=r"loss 3 and gradient norm nan in step 5: rank 1, ln_f\.weight"):
        run_local(3, rank)
