"""Claims about `--verify`: it sees each of these mistakes in every layout, dtype and step, and passes what is right."""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from planted import MISTAKES, GradientTimes
from training import bits, config_for, on_each_rank, ranks_of, run_until, trainer_for, verdicts, verified

from minipar.comm import run_local
from minipar.memory import KINDS, MemoryLedger
from minipar.parallel.placement import Shard
from minipar.train.data import Tokens
from minipar.train.rounding import MOVED, ROUNDINGS, GradientCheck, quantities
from minipar.train.trainer import Trainer
from minipar.train.verify import Verifier, verify

TEXT = Tokens(np.random.Generator(np.random.Philox(6)).integers(0, 61, 900).astype(np.uint8), "random text", 61)
SHAPE = "--layers 4 --hidden 16 --heads 4 --seq-len 8 --vocab-size 61 --global-batch 8"
LAYOUTS = [
    "--dp 2",
    "--dp 4 --zero-stage 1",
    "--dp 2 --zero-stage 2 --microbatches 2 --sync-every-microbatch",
    "--dp 4 --zero-stage 3 --reduction ordered",
    "--dp 4 --zero-stage 2 --zero-replicas 2",
    "--tp 2",
    "--tp 2 --sequence-parallel --dp 2 --zero-stage 1",
    "--cp 2",
    "--cp 2 --context-parallel ulysses --tp 2",
    "--pp 2 --microbatches 4 --clip-grad 0.1",
    "--pp 2 --schedule zbv --microbatches 4 --tp 2 --dp 2",
    "--model mixtral --experts 4 --dp 2 --ep 2",
]
DTYPES = ["float64", "float32", "bf16", "fp16"]
CASES = list(itertools.product(LAYOUTS, DTYPES, (1, 300)))


@pytest.fixture(scope="module")
def after_299_steps(tmp_path_factory):
    """Return, for a dtype and the flags of a model, a directory with one device's checkpoint of step 299."""

    @cache
    def directory(dtype, model):
        folder = tmp_path_factory.mktemp("trained")
        run_until(TEXT, config_for(f"{SHAPE} {model} --dtype {dtype} --steps 300"), folder, stop=299)
        return folder

    return directory


@pytest.mark.sampled(54)
@pytest.mark.parametrize(("layout", "dtype", "step"), CASES)
def test_every_mistake_fails_in_the_first_and_300th_step(layout, dtype, step, after_299_steps):
    """In one step each, so a mistake need not add up; with the same checks the right run passes."""
    flags = f"{SHAPE} {layout} --dtype {dtype} --steps {step}"
    if step > 1:
        model = "--model mixtral --experts 4" if "mixtral" in layout else ""
        flags += f" --resume {after_299_steps(dtype, model)}"
    for kind in (Trainer, *MISTAKES):
        outcomes = {(verdict.passed, verdict.line) for verdict in verdicts(config_for(flags), TEXT, kind)}
        assert len(outcomes) == 1, "every rank hears the same"
        passed, line = outcomes.pop()
        assert passed == (kind is Trainer), (kind, line)
        assert passed or line.startswith(f"verify: FAILED: after step {step} of {step}: "), line


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", ["--tp 2 --lr 0.1", "--cp 2 --model mixtral --experts 4 --top-k 1 --lr 0.03"])
def test_the_bound_is_the_same_after_any_number_of_steps(flags):
    """With large steps, in which a training amplifies rounding; the router's gradient is zero but for rounding."""
    bounds = set()
    for steps in (1, 12):
        verdict = verdicts(config_for(f"{SHAPE} {flags} --dtype float64 --steps {steps}"), TEXT)[0]
        assert verdict.passed, verdict.line
        bounds.add(verdict.line.partition("bound ")[2].partition(";")[0])
    assert bounds == {f"{16 * 2**-52:.2g}"}


# ---- what is compared ------------------------------------------------------------------------------------------------


def verdict_of(change, flags="--dp 2 --dtype float64 --steps 2", when=1):
    """The verdict if every rank calls change(trainer) after this many checked steps."""
    config = config_for(f"{SHAPE} {flags}")

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


def nudge_each(array):
    """Change each element by one unit in its last place: the next update's rounding hides that of some elements."""
    array[...] = np.nextafter(array, array.dtype.type(9))


@pytest.mark.parametrize(("when", "change_values"), [(1, nudge_each), (2, nudge)])
@pytest.mark.parametrize("what", ["parameter", "exp_avg", "exp_avg_sq"])
def test_one_ulp_of_the_state_fails_after_any_step(what, when, change_values):
    """Of a single element after the last step, when no further one could show it."""

    def change(trainer):
        optimizer = trainer.optimizer
        change_values(optimizer.parameters[0].data if what == "parameter" else getattr(optimizer, what)[0])

    verdict = verdict_of(change, when=when)
    # From a changed moment the second step makes another parameter, which may be named first.
    named = f"{what} of wte.weight is" if when == 2 else rf"({what}|parameter) of wte.weight( and 1 more are| is)"
    assert not verdict.passed and re.search(f": {named} not bit for bit", verdict.line), verdict.line


@pytest.mark.parametrize(
    ("change", "flags", "name"),
    [
        (lambda trainer: setattr(trainer.optimizer, "steps", 0), "--dp 2", "optimizer steps is"),
        (lambda trainer: setattr(trainer.scaler, "scale", 1.0), "--dp 2 --dtype fp16", "loss scale is"),
        (lambda trainer: setattr(trainer.scaler, "skipped", 7), "--dp 2 --dtype fp16", "skipped steps is"),
        (lambda trainer: nudge(trainer.moes[1].bias), "--dp 2 --model mixtral --router-bias 0.1", "bias of layer 1"),
    ],
)  # fmt: skip
def test_what_else_a_step_changes_is_compared(change, flags, name):
    verdict = verdict_of(change, f"{flags} --steps 1")
    assert not verdict.passed and name in verdict.line, verdict.line


class OtherWeights(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        nudge(self.optimizer.parameters[0].data)


def test_weights_that_differ_from_the_start_fail():
    verdict = verdicts(config_for(f"{SHAPE} --dp 2 --steps 1"), TEXT, OtherWeights)[0]
    assert verdict.line.startswith("verify: FAILED: after step 0 of 1: parameter of wte.weight is not bit for bit")


def test_tensor_ranks_that_hold_other_copies_fail():
    """Rank 0 is sent its own copy of what every tp rank holds whole."""

    def change(trainer):
        if trainer.mesh.tp.rank == 1:
            whole = next(p for p in trainer.ddp.parameters() if not isinstance(p.placement.tp, Shard))
            nudge(whole.data)

    verdict = verdict_of(change, "--tp 2 --steps 1")
    assert verdict.line == "verify: FAILED: the ranks do not hold the same parameters or state as one another"


class ZeroOnlyInTwoBytes(GradientTimes):
    @property
    def factor(self):
        return 1.0 if self.config.run.dtype == "float32" else 0.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_mistake_that_float32_does_not_have_fails(dtype):
    """The gradients that are computed again in float32 are right."""
    flags = f"{SHAPE} --tp 2 --dtype {dtype} --steps 1"
    verdict = verdicts(config_for(flags), TEXT, ZeroOnlyInTwoBytes)[0]
    assert not verdict.passed and "after step 1 of 1: gradient of h.1.mlp.c_fc.weight" in verdict.line


class NeverLeavesStep0(Trainer):
    def train(self):
        for _ in range(self.config.optimizer.steps):
            yield self.step(0)


class Backwards(Trainer):
    def train(self):
        for step in reversed(range(self.config.optimizer.steps)):
            yield self.step(step)


class LeavesOutTheLastStep(Trainer):
    def train(self):
        for step in range(self.config.optimizer.steps - 1):
            yield self.step(step)


@pytest.mark.parametrize("kind", [NeverLeavesStep0, Backwards, LeavesOutTheLastStep])
@pytest.mark.parametrize("layout", ["--dp 2 --reduction ordered", "--tp 2"])
def test_every_step_is_taken_in_its_turn(layout, kind):
    verdict = verdicts(config_for(f"{SHAPE} {layout} --dtype float64 --steps 3"), TEXT, kind)[0]
    assert not verdict.passed and ("was due" in verdict.line or "were due" in verdict.line), verdict.line


class QueriesAreNeverTrainedInTwoBytes(Trainer):
    """Queries' and keys' gradients are small: zeros are less than the roundings of all others."""

    def compute_gradient(self, step):
        loss = super().compute_gradient(step)
        for p in self.ddp.parameters() if self.config.run.dtype != "float32" else ():
            if "q_proj" in p.placement.name or "k_proj" in p.placement.name:
                p.grad *= 0
        return loss


class ReportsATenthMore(Trainer):
    def compute_gradient(self, step):
        return super().compute_gradient(step) * (1.1 if self.config.run.dtype != "float32" else 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Trainer, QueriesAreNeverTrainedInTwoBytes, ReportsATenthMore])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_2_bytes_the_rounding_is_measured_not_assumed(dtype, kind):
    config = config_for(f"{SHAPE} --model llama --tp 2 --dtype {dtype} --steps 2")
    verdict = verdicts(config, TEXT, kind)[0]
    assert verdict.passed == (kind is Trainer), verdict.line


class ReportsTheNextNorm(Trainer):
    def _clip_grad_norm(self, max_norm):
        return math.nextafter(super()._clip_grad_norm(max_norm), math.inf)


def test_a_norm_rounded_otherwise_is_not_bit_for_bit():
    """Two ranks' sums have one device's bits in a ring, too, so all gradients are equal."""
    config = config_for(f"{SHAPE} --dp 2 --dtype float64 --steps 2")
    for kind, expected in ((Trainer, "2 ranks = 1 device, bit for bit"), (ReportsTheNextNorm, "within rounding")):
        for verdict in verdicts(config, TEXT, kind):
            assert verdict.passed and expected in verdict.line, verdict.line


class MiscountsLoads(Trainer):
    """Rank 0 counts three assignments for the wrong expert."""

    def update(self, *args):
        if self.mesh.world.rank == 0:
            self.moes[0].load[:2] += [3, -3]
        return super().update(*args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float64", "bf16"])
def test_loads_of_experts_are_counts(dtype):
    flags = f"{SHAPE} --model mixtral --experts 4 --dp 2 --ep 2 --router-bias 0.001 --dtype {dtype} --steps 1"
    verdict = verdicts(config_for(flags), TEXT, MiscountsLoads)[0]
    assert not verdict.passed and "loads: norm" in verdict.line, verdict.line


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (lambda trainer: nudge(trainer.optimizer.exp_avg[0]), "--dp 2"),
        (lambda trainer: nudge(trainer.optimizer.exp_avg_sq[-1]), "--tp 2"),
        (lambda trainer: nudge(trainer.moes[0].bias), "--dp 2 --model mixtral --router-bias 0.1"),
        (lambda trainer: setattr(trainer.scaler, "good_steps", 9), "--dp 2 --dtype fp16"),
    ],
)
def test_copies_of_the_state_on_other_ranks_are_compared(change, flags):
    """Also those of the optimizer, which only a later step would show."""

    def change_rank_1(trainer):
        if trainer.mesh.world.rank == 1:
            change(trainer)

    verdict = verdict_of(change_rank_1, f"{flags} --steps 1")
    assert verdict.line == "verify: FAILED: the ranks do not hold the same parameters or state as one another"


class ReportsOtherCounts(Trainer):
    def step(self, step):
        return replace(super().step(step), **{self.field: 7})


@pytest.mark.parametrize(
    ("field", "flags", "words"),
    [
        ("dropped", "--model mixtral --capacity-factor 1", "experts dropped 7 assignments on the ranks"),
        ("skipped", "--dtype fp16", "the ranks say that 7 steps were skipped"),
    ],
)
def test_reported_counts_are_compared(field, flags, words):
    kind = type("Kind", (ReportsOtherCounts,), {"field": field})
    verdict = verdicts(config_for(f"{SHAPE} --dp 2 {flags} --steps 1"), TEXT, kind)[0]
    assert not verdict.passed and words in verdict.line, verdict.line


def test_a_run_that_skips_every_step_proves_nothing(too_large_a_scale):
    config = config_for(f"{SHAPE} --tp 2 --dtype fp16 --steps 3 --resume {too_large_a_scale}")
    verdict = verdicts(config, TEXT)[0]
    assert verdict.line == "verify: FAILED: all 2 steps were skipped, which proves nothing"


# ---- steps that overflow ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def too_large_a_scale(tmp_path_factory):
    """A checkpoint in fp16 whose loss scale lets gradients overflow."""
    folder = tmp_path_factory.mktemp("overflows")
    trainer = trainer_for(config_for(f"{SHAPE} --dtype fp16 --steps 1"), TEXT)
    trainer.step(0)
    trainer.scaler.scale = 2.0**26
    trainer.save(folder, 1)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["--dp 2 --reduction ordered", "--dp 4", "--tp 2"])
def test_a_run_that_skips_steps_passes(layout, too_large_a_scale):
    config = config_for(f"{SHAPE} {layout} --dtype fp16 --steps 12 --resume {too_large_a_scale}")
    results, verdict = run_local(ranks_of(config), lambda comm: verified(trainer_for(config, TEXT, comm)))[0]
    assert 0 < results[-1].skipped < 11 and verdict.passed, verdict.line


class OverflowsAlone(Trainer):
    def compute_gradient(self, step):
        loss = super().compute_gradient(step)
        self.ddp.parameters()[0].grad.reshape(-1)[0] = np.inf
        return loss


@pytest.mark.parametrize("layout", ["--dp 2 --reduction ordered", "--tp 2"])
def test_a_step_that_only_the_ranks_skip_fails(layout):
    verdict = verdicts(config_for(f"{SHAPE} {layout} --dtype fp16 --steps 1"), TEXT, OverflowsAlone)[0]
    assert not verdict.passed and ("not finite on the ranks" in verdict.line or "not bit for bit" in verdict.line)


class Overflowing:
    """One device whose gradient overflows if its loss scale is larger than `most`."""

    def __init__(self, most):
        self.most, self.scaler, self.moes = most, SimpleNamespace(scale=1.0), []
        self.config = SimpleNamespace(run=SimpleNamespace(dtype="float64"))

    def compute_gradient(self, step):
        self.gradient = np.array([np.inf if self.scaler.scale > self.most else 2.0])
        return 3.0

    def state_dict(self, gradients):
        return {"w": self.gradient}


@pytest.mark.parametrize(
    ("ranks", "most", "words"),
    [
        (np.inf, 0.9, ""),
        (np.inf, 1 + 2**-52, ""),
        (np.inf, 1 + 2**-40, "a value is not finite on the ranks, but all are on one device"),
        (2.0, 1 - 2**-52, ""),
        (2.0, 0.9, "all values are finite on the ranks, but not on one device"),
    ],
)
def test_an_overflow_is_one_devices_but_for_roundings(ranks, most, words):
    check = GradientCheck(Overflowing(most), exact=False, loads=False)
    assert check.problem(0, quantities(3.0, {"w": np.array([ranks])}, np.zeros(0))) == words
    assert check.device.scaler.scale == 1.0


# ---- rounding --------------------------------------------------------------------------------------------------------


class Device(SimpleNamespace):
    """One device whose gradient is a function of its only parameter."""

    def __init__(self, gradient, value=1.0):
        parameter = SimpleNamespace(data=np.array([value, 2.0]), dtype="float64")
        config = SimpleNamespace(run=SimpleNamespace(dtype="float64"))
        super().__init__(
            config=config,
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
    """What GradientCheck says if the ranks' gradient of w differs by this much from gradient(w) on one device."""
    device = Device(gradient)
    ranks = quantities(3.0, device.state_dict(True), np.zeros(0))
    ranks["gradient of w"] = ranks["gradient of w"] + np.array([difference, 0.0])
    check = GradientCheck(device, exact=exact, loads=False)
    return check.problem(0, ranks), check


def test_roundings_of_a_gradients_norm_are_allowed_and_no_more():
    scale = (5**0.5 * (1 + 1 / ROUNDINGS)) * 2**-52
    assert problem(np.copy, 0.9 * ROUNDINGS * scale)[0] == ""
    text, check = problem(np.copy, 1.1 * MOVED * ROUNDINGS * scale)
    assert text.startswith("gradient of w: norm ") and "rounding explains" in text
    assert problem(np.copy, 2.0**-52, exact=True)[0].startswith("gradient of w is not bit for bit")
    assert (check.compared, check.rounded, check.explained) == (3, 1, 1)


def test_what_moved_parameters_explain_is_allowed():
    """A difference of two nearly equal values: a rounding of a parameter changes it by 1e6 roundings of its own."""

    def cancels(values):
        return (values - [1 - 1e-6, 2.0]) * 1e3

    assert problem(np.copy, 1e-12)[0] != ""
    text, check = problem(cancels, 1e-12)
    assert text == "" and check.explained == 1
    assert problem(cancels, 1e-8)[0] != ""


def test_a_gradient_that_is_zero_but_for_rounding_is_allowed():
    assert problem(np.zeros_like, 1e-20)[0] == "" and problem(np.zeros_like, 1e-15)[0] != ""


def test_a_proof_says_how_much_was_found_and_explained():
    text, check = problem(lambda values: (values - [1 - 1e-6, 2.0]) * 1e3, 1e-12)
    assert text == "", "what is explained is no part of the largest difference"
    assert check.found() == "0 of their norm, bound 3.6e-15, but for 1 of 3 whose condition explains more"
    _, check = problem(np.copy, 2.0**-52)
    assert re.fullmatch(r"[\d.e-]+ of their norm \(w, step 1\), bound 3.6e-15", check.found())
    check.sharper = check.device
    assert check.found().endswith("(w, step 1), bound 4 times the rounding")
    assert problem(np.copy, 0.0)[1].found() == "0 of their norm, bound 3.6e-15"


def test_what_exceeds_its_limit_most_is_named_first():
    device = Device(np.copy)
    ranks = quantities(3.0, device.state_dict(True), np.zeros(0))
    ranks["gradient of w"] = ranks["gradient of w"] * (1 + 1e-9)
    ranks["gradient of other"] = ranks["gradient of other"] * (1 + 1e-6)
    text = GradientCheck(device, exact=False, loads=False).problem(0, ranks)
    assert text.startswith(
        "gradient of other (and 1 more): norm 0.001 on the ranks, 0.001 on one device; they differ by 1e-09"
    )


class Routing(Device):
    """One device of which a token goes to another expert if its parameter is moved."""

    def __init__(self, tp):
        super().__init__(np.copy)
        self.layout = SimpleNamespace(tp=tp, cp=1)

    def compute_gradient(self, step):
        is_moved = self.optimizer.parameters[0].data[0] != 1.0
        self.moes = [SimpleNamespace(load=np.array([5, 3]) if is_moved else np.array([4, 4]), dropped=0)]
        return 3.0


@pytest.mark.parametrize(("tp", "explained"), [(1, 0), (2, 2)])
def test_loads_may_differ_only_where_a_layer_is_split(tp, explained):
    """By twice what moved parameters change, if a layer is split over ranks; else one device sums in the same order."""
    for moved in range(5):
        ranks = quantities(3.0, Device(np.copy).state_dict(True), np.array([[4 + moved, 4 - moved, 0]]))
        text = GradientCheck(Routing(tp), exact=False, loads=True).problem(0, ranks)
        assert text.startswith("loads: norm") == (moved > explained), text


# ---- what --verify leaves alone --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", ["--tp 2 --dp 2 --dtype bf16", "--pp 2 --microbatches 2 --zero-stage 1 --dp 2"])
def test_a_verified_run_has_the_bits_bytes_and_memory_of_another(flags):
    config = config_for(f"{SHAPE} {flags} --steps 3")

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


def test_verify_takes_the_steps_that_are_left():
    config = config_for(f"{SHAPE} --dp 2 --steps 2")
    lines = on_each_rank(config, TEXT, lambda trainer, results: json.dumps(len(results)))
    assert lines == ["2", "2"]
    assert "in each of 2 steps" in run_local(2, lambda comm: verify(trainer_for(config, TEXT, comm)))[0].line
