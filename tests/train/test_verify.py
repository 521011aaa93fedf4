"""Claims about `--verify`: it passes what is right in every layout and dtype, and sees each of these mistakes.

tests/release/train/test_verify.py plants them in more layouts, dtypes and steps.
"""

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from combinations import TEXT, config_of
from mistakes_in_training import MISTAKES, gradient_times, overriding
from training import bits, ranks_of, run_until, trainer_for, verdicts, verified

from minipar.comm import run_local
from minipar.memory import KINDS, MemoryLedger
from minipar.parallel.placement import Shard
from minipar.train.rounding import MOVED, ROUNDINGS, GradientCheck, quantities
from minipar.train.trainer import Trainer
from minipar.train.verify import Verifier

RUN = "--layers 4 --eps 1e-8 --global-batch 8"
BITS, ROUNDING = "bit for bit", "within rounding"


def verdict_of(flags, kind=Trainer):
    """The verdict on a run, which every rank hears alike."""
    found = {(verdict.passed, verdict.line) for verdict in verdicts(config_of(f"{RUN} {flags}"), TEXT, kind)}
    assert len(found) == 1
    return SimpleNamespace(**dict(zip(("passed", "line"), found.pop(), strict=True)))


RIGHT = [
    ("--dp 2 --dtype float32 --reduction ring", BITS),  # of two ranks, a + b = b + a
    ("--dp 4 --reduction ring", ROUNDING),
    ("--dp 3 --zero-stage 2 --global-batch 6 --dtype bf16", BITS),
    ("--dp 4 --zero-stage 3 --microbatches 2 --sync-every-microbatch --clip-grad 0.1 --dtype float32", BITS),
    ("--dp 4 --zero-stage 2 --zero-replicas 2 --dtype fp16", BITS),
    ("--tp 2 --lr 0.1 --dtype float32", ROUNDING),
    ("--tp 2 --sequence-parallel --dp 2 --zero-stage 1 --dtype bf16", ROUNDING),
    ("--cp 2 --context-parallel ulysses --tp 2 --dtype fp16", ROUNDING),
    ("--pp 2 --schedule zbv --microbatches 4 --tp 2 --dp 2 --dtype fp16", ROUNDING),
    ("--pp 2 --microbatches 4 --dtype bf16 --gradients bf16", BITS),
    ("--model mixtral --experts 4 --dp 2 --ep 2 --dtype float32", ROUNDING),
    ("--model mixtral --cp 2 --top-k 1 --lr 0.03", ROUNDING),  # the router's gradient is zero but for rounding
    ("--model llama --tp 4 --kv-heads 1 --dtype bf16", ROUNDING),
    ("--tp 2 --reduction tree --vocab-size 16 --dtype float32", BITS),
]


@pytest.mark.parametrize(("flags", "how"), RIGHT)
def test_a_right_run_passes(flags, how):
    verdict = verdict_of(f"{flags} --steps 3")
    assert verdict.passed and how in verdict.line, verdict.line


def test_the_bound_is_the_same_after_any_number_of_steps():
    """With large steps, in which a training amplifies rounding."""
    bounds = set()
    for steps in (1, 12):
        verdict = verdict_of(f"--tp 2 --lr 0.1 --steps {steps}")
        assert verdict.passed, verdict.line
        bounds.add(verdict.line.partition("bound ")[2].partition(";")[0])
    assert bounds == {f"{16 * 2**-52:.2g}"}


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_in_its_first_step(name):
    flags, kind, step = MISTAKES[name]
    verdict = verdict_of(f"{flags} --steps 2", kind)
    assert not verdict.passed and f"after step {step} of 2" in verdict.line, verdict.line


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 3", "--tp 2", "--pp 2 --microbatches 4 --reduction ring"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bf16", "fp16"])
def test_a_thousandth_is_seen_in_every_dtype(dtype, layout):
    verdict = verdict_of(f"{layout} --dtype {dtype} --steps 1", gradient_times(1.001))
    assert not verdict.passed and "h.1.mlp.c_fc.weight" in verdict.line, verdict.line


def compute_in_two_bytes_alone(self, right, step):
    """Queries' gradients are small: zeros are less than the roundings of all others. In float32 they are right."""
    loss = right(step)
    for p in self.ddp.parameters() if self.config.run.dtype != "float32" else ():
        if "q_proj" in p.placement.name:
            p.grad *= 0
    return loss


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_two_bytes_rounding_is_measured_not_assumed(dtype):
    kind = overriding("compute_gradient", compute_in_two_bytes_alone)
    assert not verdict_of(f"--model llama --tp 2 --dtype {dtype}", kind).passed


# ---- the state -------------------------------------------------------------------------------------------------------


def changed(change, flags, when=1):
    """The verdict if every rank calls change(trainer) after this many checked steps."""
    config = config_of(f"{RUN} {flags}")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        verifier = Verifier(trainer)
        for result in trainer.train():
            verifier.check_step(result)
            if result.step + 1 == when:
                change(trainer)
        return verifier.verdict()

    return run_local(ranks_of(config), rank)[0]


def nudge(array):
    """Change the first element by one unit in its last place."""
    flat = array.reshape(-1)
    flat[0] = np.nextafter(flat[0], array.dtype.type(9))


STATE = {
    "wte.weight": lambda trainer: nudge(trainer.optimizer.parameters[0].data),
    "exp_avg of wte.weight": lambda trainer: nudge(trainer.optimizer.exp_avg[0]),
    "exp_avg_sq of wte.weight": lambda trainer: nudge(trainer.optimizer.exp_avg_sq[0]),
    "optimizer steps": lambda trainer: setattr(trainer.optimizer, "steps", 0),
    "loss scale": lambda trainer: setattr(trainer.scaler, "scale", 7.0),
    "skipped steps": lambda trainer: setattr(trainer.scaler, "skipped", 7),
    "wpe.weight": lambda trainer: trainer.model.wpe.weight.data.fill(np.nan),
}


@pytest.mark.parametrize("name", STATE)
def test_one_ulp_of_the_state_fails_after_the_last_step(name):
    """When no further step could show it."""
    verdict = changed(STATE[name], "--dp 2 --steps 2", when=2)
    assert not verdict.passed and name in verdict.line, verdict.line


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 3", "--tp 2"])
def test_a_value_that_is_not_a_number_fails(layout):
    def spoil(trainer):
        trainer.optimizer.parameters[-1].data.reshape(-1)[-1:] = np.nan

    assert not changed(spoil, f"{layout} --steps 1").passed


def whole(trainer):
    """A parameter that every rank of tp holds whole, which rank 0 is sent from itself alone."""
    return next(p for p in trainer.ddp.parameters() if not isinstance(p.placement.tp, Shard))


COPIES = [
    ("--dp 2", lambda trainer: nudge(trainer.optimizer.parameters[-1].data)),
    ("--dp 2", lambda trainer: nudge(trainer.optimizer.exp_avg[0])),
    ("--dp 2 --dtype fp16", lambda trainer: nudge(trainer.optimizer.masters[-1])),
    ("--dp 2 --dtype fp16", lambda trainer: setattr(trainer.scaler, "good_steps", 9)),
    ("--dp 2 --zero-stage 1", lambda trainer: nudge(trainer.ddp.parameters()[0].data)),
    ("--tp 2", lambda trainer: nudge(whole(trainer).data)),
    ("--dp 4 --zero-stage 2 --zero-replicas 2", lambda trainer: nudge(trainer.optimizer.exp_avg[0])),
    ("--dp 2 --model mixtral --router-bias 0.1", lambda trainer: nudge(trainer.moes[0].bias)),
]


@pytest.mark.parametrize(("flags", "change"), COPIES)
def test_what_several_ranks_hold_is_compared(flags, change):
    def change_the_last_rank(trainer):
        if trainer.mesh.world.rank == trainer.mesh.world.size - 1:
            change(trainer)

    verdict = changed(change_the_last_rank, f"{flags} --steps 1")
    assert not verdict.passed and "the ranks do not hold the same" in verdict.line


@pytest.mark.parametrize(
    ("field", "flags"), [("dropped", "--model mixtral --capacity-factor 1"), ("skipped", "--dtype fp16")]
)
def test_reported_counts_are_compared(field, flags):
    kind = overriding("step", lambda self, right, step: replace(right(step), **{field: 7}))
    verdict = verdict_of(f"--dp 2 {flags} --steps 1", kind)
    assert not verdict.passed and "7" in verdict.line, verdict.line


# ---- steps -----------------------------------------------------------------------------------------------------------

TURNS = {"never leaves step 0": [0, 0, 0], "backwards": [2, 1, 0], "leaves out the last": [0, 1]}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("layout", ["--dp 2", "--tp 2"])
def test_every_step_is_taken_in_its_turn(layout, turns):
    kind = overriding("train", lambda self, right: map(self.step, TURNS[turns]))
    assert not verdict_of(f"{layout} --steps 3", kind).passed


def test_a_resumed_run_is_compared_with_one_that_never_stopped(tmp_path):
    """Where one device can repeat it; else it is compared from the checkpoint on."""
    run_until(TEXT, config_of(f"{RUN} --dp 2 --steps 4"), tmp_path, 2)
    for flags, words in (("--dp 2 --pp 2", "never stopped"), ("--dp 4", "checkpoint"), ("--tp 2", "checkpoint")):
        verdict = verdict_of(f"{flags} --steps 4 --resume {tmp_path}")
        assert verdict.passed and words in verdict.line and "resumed after 2" in verdict.line, verdict.line


@pytest.fixture(scope="module")
def too_large_a_scale(tmp_path_factory):
    """A checkpoint in fp16 whose loss scale lets gradients overflow."""
    folder = tmp_path_factory.mktemp("overflows")
    trainer = trainer_for(config_of(f"{RUN} --dtype fp16 --steps 1"), TEXT)
    trainer.step(0)
    trainer.scaler.scale = 2.0**26
    trainer.save(folder, 1)
    return folder


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("layout", ["--dp 4 --reduction ring", "--tp 2"])
def test_a_run_that_skips_steps_passes_unless_it_skips_all(layout, too_large_a_scale):
    flags = f"{RUN} {layout} --dtype fp16 --resume {too_large_a_scale} --steps"
    config = config_of(f"{flags} 12")
    results, verdict = run_local(ranks_of(config), lambda comm: verified(trainer_for(config, TEXT, comm)))[0]
    assert 0 < results[-1].skipped < 11 and verdict.passed, verdict.line
    assert not verdicts(config_of(f"{flags} 3"), TEXT)[0].passed


def overflow_alone(self, right, step):
    loss = right(step)
    self.ddp.parameters()[0].grad.reshape(-1)[0] = np.inf
    return loss


@pytest.mark.parametrize("layout", ["--dp 2", "--tp 2"])
def test_a_step_that_only_the_ranks_skip_fails(layout):
    assert not verdict_of(f"{layout} --dtype fp16 --steps 1", overriding("compute_gradient", overflow_alone)).passed


# ---- rounding --------------------------------------------------------------------------------------------------------


class Device(SimpleNamespace):
    """One device whose gradient is a function of its only parameter."""

    def __init__(self, gradient, value=1.0):
        parameter = SimpleNamespace(data=np.array([value, 2.0]), dtype="float64")
        super().__init__(
            config=SimpleNamespace(run=SimpleNamespace(dtype="float64")),
            scaler=SimpleNamespace(scale=1.0),
            moes=[],
            gradient=gradient,
            optimizer=SimpleNamespace(parameters=[parameter]),
        )

    def compute_gradient(self, step):
        return 3.0

    def state_dict(self, gradients):
        return {"w": self.gradient(self.optimizer.parameters[0].data), "other": np.array([1e-3])}


def problem(gradient, difference, exact=False):
    """Return GradientCheck's words if the ranks' gradient of w differs by this much from gradient(w) on one device."""
    device = Device(gradient)
    ranks = quantities(3.0, device.state_dict(True), np.zeros(0))
    ranks["gradient of w"] = ranks["gradient of w"] + np.array([difference, 0.0])
    return GradientCheck(device, exact=exact, loads=False).problem(0, ranks)


def test_roundings_of_a_gradients_norm_are_allowed_and_no_more():
    scale = (5**0.5 * (1 + 1 / ROUNDINGS)) * 2**-52
    assert problem(np.copy, 0.9 * ROUNDINGS * scale) == ""
    assert "gradient of w" in problem(np.copy, 1.1 * MOVED * ROUNDINGS * scale)
    assert "gradient of w" in problem(np.copy, 2.0**-52, exact=True)
    assert problem(np.zeros_like, 1e-20) == "" and problem(np.zeros_like, 1e-15) != ""
    assert problem(np.copy, np.nan) != ""


def test_what_moved_parameters_explain_is_allowed():
    """A difference of two nearly equal values: a rounding of a parameter changes it by 1e6 roundings of its own."""

    def cancels(values):
        return (values - [1 - 1e-6, 2.0]) * 1e3

    assert problem(np.copy, 1e-12) != ""
    assert problem(cancels, 1e-12) == ""
    assert problem(cancels, 1e-8) != ""


def test_what_exceeds_its_limit_most_is_named_first():
    device = Device(np.copy)
    ranks = quantities(3.0, device.state_dict(True), np.zeros(0))
    ranks["gradient of w"] = ranks["gradient of w"] * (1 + 1e-9)
    ranks["gradient of other"] = ranks["gradient of other"] * (1 + 1e-6)
    text = GradientCheck(device, exact=False, loads=False).problem(0, ranks)
    assert re.match(r"gradient of other .*0\.001.*1e-09", text), text


# ---- what --verify leaves alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["--tp 2 --dp 2 --dtype bf16", "--pp 2 --microbatches 2 --zero-stage 1 --dp 2"])
def test_a_verified_run_has_the_bits_bytes_and_memory_of_another(flags):
    config = config_of(f"{RUN} {flags}")

    def rank(comm, verifying):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = trainer_for(config, TEXT, comm)
            verifier = Verifier(trainer) if verifying else None
            comm.tracer.enabled = True
            for result in trainer.train():
                if verifier is not None:
                    verifier.check_step(result)
            comm.tracer.enabled = False
        if verifier is not None:
            assert verifier.verdict().passed
        events = Counter((event["name"], event["ph"]) for event in comm.tracer.events)
        sent = {key: tuple(count) for key, count in comm.traffic.counts.items() if key[0] != "control"}
        held = [ledger.held[kind] for kind in KINDS[:3]]  # another rank's thread may free a message a little later
        return bits(trainer.state_dict()), events, sent, comm.clock.now(), held

    plain, checked = (run_local(4, rank, verifying, clock="model") for verifying in (False, True))
    assert plain == checked
