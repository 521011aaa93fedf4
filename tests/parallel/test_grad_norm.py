"""Claims about the norm over every mesh axis: each element counts once, and every stage and rank has the same bits."""

import math
from fractions import Fraction

import numpy as np
import pytest
from training import config_for, ranks_of, trainer_for

from minipar.comm import run_local, serial, wire_bytes
from minipar.errors import UsageError
from minipar.more.tree import exact_norm
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.placement import elements_of, placement_of
from minipar.parallel.state import local_part
from minipar.train.data import Tokens

SHAPE = "--layers 4 --hidden 12 --heads 4 --seq-len 8 --vocab-size 11 --dtype float64 --global-batch 12"
TEXT = Tokens(np.arange(100, dtype=np.uint8) % 11, "0 to 10")
LAYOUTS = [
    "--dp 3",
    "--tp 4",
    "--pp 2 --microbatches 2",
    "--dp 3 --tp 2 --sequence-parallel",
    "--dp 2 --tp 2 --pp 2 --microbatches 2",
]


def gradient():
    """A gradient of the serial model by name."""
    random = np.random.Generator(np.random.Philox(9))
    model = trainer_for(config_for(SHAPE), TEXT).model
    return {name: random.standard_normal(p.shape) for name, p in model.named_parameters()}


GRADIENT = gradient()
NORM = np.linalg.norm(np.concatenate([array.reshape(-1) for array in GRADIENT.values()]))


def with_gradient(trainer):
    """Give this rank's parameters or shards their elements of GRADIENT."""
    for p in trainer.ddp.parameters():
        own = local_part(p.placement.tp, GRADIENT[p.placement.name], elements_of(p))
        p.grad = own.reshape(p.shape).copy()
    return trainer.ddp.parameters()


def norms(layout, stage, max_norm=None, inspect=lambda trainer, norm: norm, clip=clip_grad_norm):
    """Return what `inspect(trainer, norm)` returns on each rank."""
    config = config_for(f"{SHAPE} {layout} --zero-stage {stage}")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        mesh, parameters = trainer.mesh, with_gradient(trainer)
        comm.traffic.reset()
        return inspect(trainer, clip(parameters, max_norm, trainer.ddp.comm, mesh.tp, mesh.pp))

    return run_local(ranks_of(config), rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_counts_once_in_the_same_bits_at_each_stage(layout):
    by_stage = [norms(layout, stage) for stage in range(4)]
    assert by_stage[0][0] == pytest.approx(NORM, rel=1e-14)
    assert all(norm == by_stage[0][0] for ranks in by_stage for norm in ranks)


EVERY = [(layout, stage) for layout in LAYOUTS for stage in (0, 2)]


@pytest.mark.parametrize(("layout", "stage"), [*EVERY, ("--dp 4 --zero-replicas 2", 2)])
def test_without_rounding_every_layout_has_one_norm(layout, stage):
    """It is the root of the exact sum of the squares, rounded once."""
    squares = sum(Fraction(float(value)) ** 2 for array in GRADIENT.values() for value in array.reshape(-1))
    found = norms(layout, stage, clip=exact_norm.clip_exact_norm)
    assert set(found) == {math.sqrt(float(squares))}


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_device_that_adds_as_many_chunks_has_the_same_bits(ranks):
    trainer = trainer_for(config_for(SHAPE), TEXT)
    single = clip_grad_norm(with_gradient(trainer), None, serial(), chunks=ranks)
    assert norms(f"--dp {ranks} --global-batch 24", 2) == [single] * ranks


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_scales_every_element_and_returns_the_norm(layout, stage):
    def check(trainer, norm):
        for p in trainer.ddp.parameters():
            own = local_part(p.placement.tp, GRADIENT[p.placement.name], elements_of(p)).reshape(p.shape)
            assert np.array_equal(p.grad, own * (0.5 / (norm + 1e-6)))
        return norm

    assert norms(layout, stage, 0.5, check)[0] == pytest.approx(NORM, rel=1e-14)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_sends_what_the_docstring_says(layout, stage):
    """Float64s: over dp one with ZeRO, over tp one for each chunk, over pp two for each unit and chunk."""

    def check(trainer, norm):
        mesh, sent = trainer.mesh, trainer.mesh.world.traffic
        chunks = 1 if stage else mesh.dp.size
        units = placement_of(trainer.ddp.parameters()[0]).units
        counts = {"dp": int(stage > 0), "tp": chunks, "pp": 2 * units * chunks}
        for axis, count in counts.items():
            comm = getattr(mesh, axis)
            expected = wire_bytes("all_reduce", "ordered", count, 8, comm.size, comm.rank) if count else 0
            assert sent.bytes(axis=axis) == expected, axis

    norms(layout, stage, inspect=check)


# ---- without rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[], [1.0, 1.0, 0.5], [2.0**-40, 3 * 2.0**-40], [2.0**300, 1.0], [2.0**-300, 1.0]])
def test_few_squares_add_up_exactly(values):
    """A rank may hold an empty shard."""
    expected = float(sum(Fraction(value) ** 2 for value in values))
    assert exact_norm.exact_square_sum([np.zeros(0), np.array(values)], []) == expected


class ManyRanks:
    """An axis of as many ranks, all of which hold the same gradients."""

    def __init__(self, ranks):
        self.ranks = ranks

    def all_reduce(self, x, op="sum", algorithm="auto"):
        if op == "sum":
            x *= self.ranks


def test_sums_of_many_ranks_are_added_as_integers():
    """Sums in float64 would be rounded once more."""
    axis = ManyRanks(2**28 - 1)
    random = np.random.Generator(np.random.Philox(6))
    for _ in range(50):
        values = random.integers(1, 2**26, 3) / 2.0**26  # the square of each is a float64
        squares = sum(Fraction(float(value)) ** 2 for value in values)
        assert exact_norm.exact_square_sum([values], [axis]) == float((2**28 - 1) * squares)


def test_more_squares_than_fit_are_refused():
    exact_norm.check_size(2**31)
    with pytest.raises(UsageError, match=str(2**31 + 1)):
        exact_norm.check_size(2**31 + 1)
