"""Claims about the parts of `--verify`: which layouts have one device's bits, the norm, the proof, and the copies."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from training import config_for, trainer_for

from minipar.comm import run_local
from minipar.train.data import Tokens
from minipar.train.verify import Verifier, is_exact, same_over

TEXT = Tokens((np.arange(500) % 16).astype(np.uint8), "a text", 16)
SMALL = "--layers 2 --hidden 8 --heads 2 --seq-len 8 --vocab-size 16 --global-batch 8 --steps 2"


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("--dp 2", False),
        ("--dp 2 --reduction ordered", True),
        ("--dp 2 --pp 2 --zero-stage 3 --reduction ordered", True),
        ("--tp 2 --reduction ordered", False),
        ("--cp 2 --reduction ordered", False),
        ("--dp 2 --ep 2 --model mixtral --reduction ordered", False),
        ("--tp 2 --reduction tree", True),
        ("--reduction ring", False),
    ],
)
def test_bits_are_promised_where_one_device_adds_alike(flags, exact):
    assert is_exact(config_for(f"{SMALL} {flags}")) is exact


def verifier(**parts):
    """A verifier of which only these parts exist."""
    made = Verifier.__new__(Verifier)
    made.__dict__.update(parts)
    return made


def step(number=0, norm=1.0):
    return SimpleNamespace(step=number, grad_norm=norm)


# ---- the norm --------------------------------------------------------------------------------------------------------

ULP = 2.0**-52
NORMS = [
    (1.0, 1.0, False, True, 0),
    (1.0, 1 + 2 * ULP, False, True, 1),  # 4 values round by 2^-53 each
    (1.0, 1 - 2 * ULP, False, True, 1),
    (1.0, 1 + 3 * ULP, False, False, 1),
    (4.0, 4 + 8 * ULP, False, True, 1),
    (4.0, 4 + 12 * ULP, False, False, 1),
    (0.25, 0.25 + 0.5 * ULP, False, True, 1),
    (0.25, 0.25 + 0.75 * ULP, False, False, 1),
    (0.0, 0.0, False, True, 0),
    (1.0, 1 + ULP, True, False, 1),
    (1.0, 1.0, True, True, 0),
    (math.inf, math.nan, True, True, 0),
    (math.nan, math.inf, False, True, 0),
    (math.inf, 1.0, False, False, 1),
    (1.0, math.nan, False, False, 1),
]


@pytest.mark.parametrize(("device", "ranks", "exact", "passes", "rounded"), NORMS)
def test_a_norm_may_round_as_often_as_it_has_terms(device, ranks, exact, passes, rounded):
    check = SimpleNamespace(exact=exact, rounded=0)
    optimizer = SimpleNamespace(parameters=[])
    one = SimpleNamespace(optimizer=optimizer, size=4, _clip_grad_norm=lambda limit: device)
    text = verifier(device=one, gradients=check)._different_norm(step(norm=ranks))
    differs = f"the gradient norm is {ranks!r} on the ranks, but these gradients have the norm {device!r}"
    assert text == ("" if passes else differs) and check.rounded == rounded


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_out_of_its_turn_is_named():
    """The run was resumed after 3 steps and has checked 2."""
    made = verifier(trainer=SimpleNamespace(first_step=3), steps=2)
    for number in (4, 6, 0):
        text = made._different_step(step(number), {})
        assert text == f"this was step {number} (counted from 0), but step 5 was due"


@pytest.mark.parametrize(
    ("steps", "compared", "text"),
    [
        (6, 1, "6 steps were taken, but 7 were due"),
        (8, 1, "8 steps were taken, but 7 were due"),
        (7, 0, "all 7 steps were skipped, which proves nothing"),
        (7, 1, "the state"),
    ],
)
def test_every_step_that_is_due_was_taken(steps, compared, text):
    config = SimpleNamespace(optimizer=SimpleNamespace(steps=10))
    trainer = SimpleNamespace(config=config, first_step=3)
    made = verifier(trainer=trainer, steps=steps, gradients=SimpleNamespace(compared=compared))
    made._different_state = lambda state: "the state"
    assert made._different_end({}) == text


def test_a_run_without_a_step_left_is_compared_as_it_is():
    config = SimpleNamespace(optimizer=SimpleNamespace(steps=3))
    made = verifier(
        trainer=SimpleNamespace(config=config, first_step=3), steps=0, gradients=SimpleNamespace(compared=0)
    )
    made._different_state = lambda state: ""
    assert made._different_end({}) == ""


# ---- the proof -------------------------------------------------------------------------------------------------------

EACH = "loss, norm, gradients and updates of 2 parameters (1,234 values) in"
NEVER = "as one device that never stopped"
FOUND = "gradients differ by at most FOUND"
PROOFS = [
    ({}, f"2 ranks = 1 device, bit for bit: {EACH} each of 3 steps"),
    ({"size": 1}, f"1 rank = 1 device, bit for bit: {EACH} each of 3 steps"),
    ({"steps": 1}, f"2 ranks = 1 device, bit for bit: {EACH} 1 step"),
    ({"steps": 0}, f"2 ranks = 1 device, bit for bit: {EACH} each of 0 steps"),
    ({"first": 5}, f"2 ranks = 1 device, bit for bit: {EACH} each of 3 steps, resumed after 5, {NEVER}"),
    (
        {"first": 5, "start": False},
        f"2 ranks = 1 device, bit for bit: {EACH} each of 3 steps, resumed after 5, from the checkpoint's state",
    ),
    ({"skipped": 1}, f"2 ranks = 1 device, bit for bit: {EACH} each of 3 steps (1 of all so far were skipped)"),
    ({"rounded": 1}, f"2 ranks = 1 device within rounding: {EACH} each of 3 steps; {FOUND}; updates equal"),
    (
        {"rounded": 7, "twin": True},
        f"2 ranks = 1 device within rounding: {EACH} each of 3 steps; {FOUND}; computed in float32, by at most TWIN; "
        "updates equal",
    ),
]


@pytest.mark.parametrize(("parts", "line"), PROOFS)
def test_a_proof_says_what_was_compared_and_how_much_differs(parts, line):
    twin = SimpleNamespace(gradients=SimpleNamespace(found=lambda: "TWIN"))
    made = verifier(
        comm=SimpleNamespace(size=parts.get("size", 2)),
        steps=parts.get("steps", 3),
        from_start=parts.get("start", True),
        trainer=SimpleNamespace(shapes=dict.fromkeys("ab"), size=1234, first_step=parts.get("first", 0)),
        device=SimpleNamespace(scaler=SimpleNamespace(skipped=parts.get("skipped", 0))),
        gradients=SimpleNamespace(rounded=parts.get("rounded", 0), found=lambda: "FOUND"),
        twin=twin if "twin" in parts else None,
    )
    assert made._proof() == f"verify: {line}"


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("neighbours", "values", "same"),
    [
        (4, [1, 1, 1, 1], [True] * 4),
        (4, [1, 1, 1, 2], [False] * 4),
        (2, [1, 1, 2, 2], [True] * 4),
        (2, [1, 2, 3, 3], [False, False, True, True]),
        (2, [1, 1, 2, 3], [True, True, False, False]),
        (1, [1, 2, 3, 4], [True] * 4),
    ],
)
def test_copies_are_compared_among_neighbouring_ranks(neighbours, values, same):
    def rank(comm):
        return same_over(comm, neighbours, [np.zeros(2), np.array([values[comm.rank]])])

    assert run_local(4, rank) == same


def test_a_run_in_2_bytes_is_computed_in_float32_besides():
    """All of it, without a limit or a file of its own; a run in 4 bytes is not, nor one whose bits are promised."""
    narrow = "--dtype bf16 --gradients bf16 --reduce-dtype bf16"
    limits = "--export directory --memory-limit 1GB"

    def rank(comm, flags):
        twin = Verifier(trainer_for(config_for(f"{SMALL} {flags}"), TEXT, comm)).twin
        if twin is None:
            return None
        run = twin.ranks.config.run
        return run.dtype, run.gradients, run.reduce_dtype, run.export, twin.ranks.config.mesh.memory_limit

    twin = ("float32", None, None, None, None)
    assert run_local(2, rank, f"--tp 2 {narrow} {limits}") == [twin, twin]
    assert run_local(2, rank, f"--tp 2 {limits}") == [None, None]
    assert run_local(2, rank, f"--dp 2 --reduction ordered {narrow}") == [None, None]
