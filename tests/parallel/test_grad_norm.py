"""Claims about the norm over every mesh axis: each element counts once, and every stage and rank has the same bits."""

import numpy as np
import pytest
from training import config_for, ranks_of, trainer_for

from minipar.comm import run_local, serial, wire_bytes
from minipar.parallel import exact_norm
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.placement import elements_of, placement_of
from minipar.parallel.state import local_part
from minipar.train.data import Tokens

pytestmark = pytest.mark.sampled(3)

SHAPE = "--layers 4 --hidden 12 --heads 4 --seq-len 8 --vocab-size 11 --dtype float64 --global-batch 12"
TEXT = Tokens(np.arange(100, dtype=np.uint8) % 11, "0 to 10", 11)
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
    return {name: random.standard_normal(shape) for name, shape in trainer_for(config_for(SHAPE), TEXT).shapes.items()}


GRADIENT = gradient()
NORM = np.linalg.norm(np.concatenate([array.reshape(-1) for array in GRADIENT.values()]))


def with_gradient(trainer):
    """Give this rank's parameters or shards their elements of GRADIENT."""
    for p in trainer.ddp.parameters():
        own = local_part(p.placement.tp, GRADIENT[p.placement.name], elements_of(p))
        p.grad = own.reshape(p.shape).copy()
    return trainer.ddp.parameters()


def norms(layout, stage, max_norm=None, inspect=lambda trainer, norm: norm, **wrong):
    """What `inspect(trainer, norm)` returns on each rank; `wrong` axes instead of the mesh's."""
    config = config_for(f"{SHAPE} {layout} --zero-stage {stage}")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        mesh, parameters = trainer.mesh, with_gradient(trainer)
        axes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}
        axes |= {axis: choose(mesh) for axis, choose in wrong.items()}
        comm.traffic.reset()
        return inspect(trainer, clip_grad_norm(parameters, max_norm, **axes))

    return run_local(ranks_of(config), rank)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_counts_once_in_the_same_bits_at_each_stage(layout):
    by_stage = [norms(layout, stage) for stage in range(4)]
    assert by_stage[0][0] == pytest.approx(NORM, rel=1e-14)
    assert all(norm == by_stage[0][0] for ranks in by_stage for norm in ranks)


@pytest.mark.parametrize("layout", ["--tp 4 --dp 2 --sequence-parallel", "--tp 4 --pp 2 --microbatches 2", "--tp 8"])
def test_a_head_that_several_ranks_copy_counts_once(layout):
    shape = f"--model llama --heads 8 --kv-heads 2 --hidden 16 --ffn 8 --layers 2 --dtype float64 {layout}"
    config = config_for(f"{shape} --seq-len 8 --vocab-size 11 --global-batch 4")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        parameters = trainer.ddp.parameters()
        for p in parameters:
            is_key = "k_proj" in p.placement.name
            p.grad = np.full(p.shape, 3.0 if is_key else 0.0)  # zeros of padding do not count either
        axes = trainer.mesh.dp, trainer.mesh.tp, trainer.mesh.pp
        return clip_grad_norm(parameters, None, *axes), exact_norm.clip_grad_norm(parameters, None, *axes)

    expected = 3.0 * np.sqrt(2 * 4 * 16)  # two layers of two heads of two rows
    assert run_local(8, rank) == [(pytest.approx(expected, rel=1e-14),) * 2] * 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
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


WRONG = {
    "tp left out": ("--dp 2 --tp 2 --pp 2 --microbatches 2", {"tp": lambda mesh: None}),
    "pp left out": ("--dp 2 --tp 2 --pp 2 --microbatches 2", {"pp": lambda mesh: None}),
    "dp alone": ("--dp 2 --tp 2 --pp 2 --microbatches 2", {"dp": lambda mesh: serial()}),
    "dp for tp": ("--dp 2 --tp 2 --pp 2 --microbatches 2", {"tp": lambda mesh: mesh.dp}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_communicator_gives_another_norm(name):
    layout, axes = WRONG[name]
    assert all(norm == pytest.approx(NORM, rel=1e-14) for norm in norms(layout, 1))
    assert any(abs(norm - NORM) > 1e-3 for norm in norms(layout, 1, **axes))


def test_a_wrong_limit_is_refused_before_anything_is_sent():
    def rank(comm):
        trainer = trainer_for(config_for(f"{SHAPE} --dp 2 --zero-stage 1"), TEXT, comm)
        parameters = with_gradient(trainer)
        comm.traffic.reset()
        with pytest.raises(ValueError, match="-1"):
            clip_grad_norm(parameters, -1.0, trainer.mesh.dp)
        return comm.traffic.messages()

    assert run_local(2, rank) == [0, 0]
