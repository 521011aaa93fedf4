"""Claims about ZeRO: every stage trains the same bits, sends what its formula says, and counts the norm once."""

from functools import lru_cache

import numpy as np
import pytest
import training
from summing_orders import in_the_order_of
from training import (
    NeverGathersTheUpdate,
    NothingDecays,
    OwnChunksNorm,
    TiedModel,
    backward,
    bits,
    clip,
    gradient_of,
    gradient_on_one_device,
    reports,
    small_gpt,
    text,
    whole_state,
)

from minipar.comm import DeviceMesh, run_local, serial, wire_bytes
from minipar.nn import SGD
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrap import shard
from minipar.parallel.zero_optimizer import ZeroOptimizer
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer

# Buckets of 3,497 = 13*269 elements (embedding and head) and 2,197 = 13^3 (a block): no number of ranks divides one.
SHAPE = "--layers 1 --hidden 13 --heads 1 --seq-len 11 --dtype float64 --weight-decay 0.1 --steps 3"
TOKENS = load_tokens(None, vocab_size=256, seq_len=11)
SHARDED = [1, 2, 3]  # stages that keep less than everything


def config_for(size, flags):
    return training.config_for(f"{SHAPE} --global-batch {6 * size} {flags}", size)


def train(size, flags):
    return training.trained(config_for(size, flags), TOKENS)


def verdicts(size, flags, kind=Trainer):
    return training.verdicts(config_for(size, flags), TOKENS, kind)


@lru_cache(maxsize=1)
def one_device(size, flags):
    trainer = in_the_order_of(config_for(size, flags), TOKENS)
    results = list(trainer.train())
    return bits(trainer.state_dict()), reports(results)


def own_samples(model, rank, scale=1.0):
    """Run forward and backward of two samples that belong to this rank; return the loss."""
    return backward(model, *text([2 * rank, 2 * rank + 1]), scale)


def gradient_of_all_ranks(size):
    return gradient_on_one_device(small_gpt(), [lambda model, r=r: own_samples(model, r) for r in range(size)])


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "reduction", "clip"), [(2, "ordered", 0), (3, "ring", 1)])
def test_all_stages_train_the_same_bits_for_20_steps(size, reduction, clip):
    flags = f"--global-batch {size} --steps 20 --reduction {reduction} --clip-grad {clip} --zero-stage"
    state, steps = train(size, f"{flags} 0")
    assert len(state) == 16 and len(steps) == 20
    assert steps[0][1] > 1 and steps[0][0] > steps[-1][0]  # clipping clips, and the model learns
    for stage in SHARDED:
        assert train(size, f"{flags} {stage}") == (state, steps), f"stage {stage}"


RECOMPUTED = "--microbatches 3 --recompute full --clip-grad 0.5"
FLOAT32 = "--dtype float32 --layers 2 --lr-schedule cosine --warmup-steps 1"


@pytest.mark.parametrize(
    ("size", "stages", "flags"),
    [(1, SHARDED, RECOMPUTED), (3, SHARDED, RECOMPUTED), (5, [1, 3], FLOAT32), (8, [2], FLOAT32)],
)
def test_in_rank_order_every_stage_trains_one_devices_bits(size, stages, flags):
    every = f"{flags} --reduction ordered"
    for stage in stages:
        assert train(size, f"{every} --zero-stage {stage}") == one_device(size, every), f"stage {stage}"


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 2), (3, 3)])
def test_synchronizing_every_microbatch_adds_in_that_order(size, stage):
    """Microbatch 0 of all ranks, then microbatch 1 of all ranks, ...: other sums than rank by rank, so other bits."""
    flags = "--microbatches 3 --reduction ordered --clip-grad 0.5"
    every = f"{flags} --zero-stage {stage} --sync-every-microbatch"
    expected = one_device(size, every)
    assert train(size, every) == expected
    if size > 1:
        assert expected != one_device(size, flags)


@pytest.mark.parametrize("stage", SHARDED)
def test_in_a_ring_every_stage_is_one_device_within_rounding(stage):
    for verdict in verdicts(3, f"--zero-stage {stage} --microbatches 2 --clip-grad 1"):
        assert verdict.passed, verdict.line


def test_prefetching_changes_no_bit():
    def losses(comm, prefetch):
        ddp = FullyShardedDataParallel(small_gpt(), comm)
        ddp.prefetch = prefetch
        loss = own_samples(ddp, comm.rank)
        ddp.synchronize()
        return loss, bits(whole_state(ddp)), bits(gradient_of(ddp))

    assert run_local(3, losses, False) == run_local(3, losses, True)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def closed_forms(trainer, microbatches=1, syncs=1):
    """Return what a step sends, from the sizes of the buckets alone: {op: bytes} of this rank."""
    comm, stage, reduction = trainer.mesh.dp, trainer.args.zero_stage, trainer.ddp.algorithm

    def over_buckets(op, algorithm):
        itemsize = np.dtype(trainer.args.dtype).itemsize
        return sum(wire_bytes(op, algorithm, b.size, itemsize, comm.size, comm.rank) for b in trainer.ddp.buckets)

    scalar = wire_bytes("all_reduce", "ordered", 1, 8, comm.size, comm.rank)
    if stage == 0:  # with the gradients the loss; the norm needs no message
        return {"reduce_scatter": 0, "all_gather": 0, "all_reduce": over_buckets("all_reduce", reduction) + scalar}
    return {
        "reduce_scatter": syncs * over_buckets("reduce_scatter", reduction),
        # Updated parameters once a step; at stage 3 each unit before each forward and before each backward.
        "all_gather": (2 * microbatches if stage == 3 else 1) * over_buckets("all_gather", "pairwise"),
        "all_reduce": 2 * scalar,  # the loss and the norm
    }


def bytes_of_a_step(size, flags, **kwargs):
    """Each rank's ({op: bytes sent in the second step}, their closed forms, the trainer)."""
    config = config_for(size, flags)

    def rank(comm):
        mesh = DeviceMesh(comm)
        comm.traffic.reset()
        trainer = Trainer(config, mesh, TOKENS)
        assert comm.traffic.messages() == 0  # every rank makes its own chunks: setting up sends nothing
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        expected = closed_forms(trainer, **kwargs)
        sent = {op: comm.traffic.bytes(op) for op in expected}
        assert comm.traffic.bytes() == sum(sent.values())
        return sent, expected, trainer

    return run_local(size, rank)


FORMS = [(1, "--reduction ring"), (3, "--reduction ring"), (5, "--reduction ordered --dtype float32 --layers 2")]


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize(("size", "flags"), FORMS)
def test_a_step_sends_the_closed_form_and_not_a_byte_more(stage, size, flags):
    for sent, expected, _ in bytes_of_a_step(size, f"--zero-stage {stage} {flags}"):
        assert sent == expected


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize(("size", "hidden"), [(3, 24), (8, 24)])
def test_ranks_that_divide_every_bucket_send_2_2_2_and_3_psi(stage, size, hidden):
    for sent, _, trainer in bytes_of_a_step(size, f"--hidden {hidden} --heads 2 --zero-stage {stage}"):
        assert all(bucket.size % size == 0 for bucket in trainer.ddp.buckets)
        scalars = (1 if stage == 0 else 2) * wire_bytes("all_reduce", "ordered", 1, 8, size, trainer.mesh.dp.rank)
        psi, volume = sum(trainer.sizes.values()), (2, 2, 2, 3)[stage]
        assert (sum(sent.values()) - scalars) * size == volume * psi * (size - 1) * 8


@pytest.mark.parametrize(("stage", "flags", "syncs"), [
    (1, "", 1), (2, "", 1), (3, "", 1), (2, "--sync-every-microbatch", 3), (3, "--sync-every-microbatch", 3),
])  # fmt: skip
def test_microbatches_are_reduced_once_or_each(stage, flags, syncs):
    flags = f"--microbatches 3 --zero-stage {stage} {flags}"
    for sent, expected, _ in bytes_of_a_step(2, flags, microbatches=3, syncs=syncs):
        assert sent == expected


@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_gradients_from_before_the_wrapper_are_dropped(stage):
    def rank(comm):
        model = small_gpt()
        own_samples(model, comm.rank)
        ddp = shard(model, comm, stage, "ordered")
        own_samples(ddp, comm.rank)
        ddp.synchronize()
        return gradient_of(ddp)

    expected = gradient_of_all_ranks(2)
    for gradient in run_local(2, rank):
        assert bits(gradient) == bits(expected)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [1, 5])
def test_under_no_sync_gradients_add_up_and_none_is_sent(size, stage):
    def rank(comm):
        ddp = shard(small_gpt(), comm, stage, "ordered")
        with ddp.no_sync():
            own_samples(ddp, comm.rank, 0.25)
            own_samples(ddp, comm.rank, 0.5)
        gathers = 2 * 2 * sum(wire_bytes("all_gather", "pairwise", b.size, 8, size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes() == comm.traffic.bytes("all_gather") == (gathers if stage == 3 else 0)
        comm.traffic.reset()
        own_samples(ddp, comm.rank, 0.25)
        ddp.synchronize()
        reduced = sum(wire_bytes("reduce_scatter", "ordered", b.size, 8, size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes("reduce_scatter") == reduced
        return gradient_of(ddp)

    # 1/4 + 1/2 + 1/4: powers of two times the same numbers lose nothing, so three passes are one.
    expected = gradient_of_all_ranks(size)
    for gradient in run_local(size, rank):
        for name, array in expected.items():
            np.testing.assert_allclose(gradient[name], array, rtol=1e-12, atol=1e-14)


# ---- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_norm_counts_each_element_once_and_clips_the_whole(size, stage):
    def rank(comm):
        ddp = shard(small_gpt(), comm, stage, "ordered")
        own_samples(ddp, comm.rank)
        ddp.synchronize()
        before = gradient_of(ddp)
        norm = clip(ddp, None)
        assert bits(gradient_of(ddp)) == bits(before)
        assert clip(ddp, 0.5) == norm
        return before, norm, gradient_of(ddp)

    expected = gradient_of_all_ranks(size)
    exact = np.linalg.norm(np.concatenate([array.reshape(-1) for array in expected.values()]))
    for before, norm, clipped in run_local(size, rank):
        assert bits(before) == bits(expected)
        assert norm == pytest.approx(exact, rel=1e-14)
        for name, array in expected.items():
            np.testing.assert_allclose(clipped[name], array * (0.5 / (norm + 1e-6)), rtol=1e-14)


# ---- mistakes, made on purpose ---------------------------------------------------------------------------------------


MISTAKES = {
    OwnChunksNorm: "--zero-stage 1 --clip-grad 1",
    NeverGathersTheUpdate: "--zero-stage 2",
    NothingDecays: "--zero-stage 1",
}


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_zero_optimizer_sums_tied_gradients_too(size):
    """Of 16 elements with ties, as GPT-2's embedding has; it forgets the gradients from before it was made."""
    x, y = np.random.Generator(np.random.Philox(9)).standard_normal((2, 17, 4))

    def after_a_step(comm, make):
        model = TiedModel()
        model.loss_sum(x, y).backward()
        optimizer = make(model.parameters(), comm)
        optimizer.zero_grad()
        (model.loss_sum(x[comm.rank :: comm.size], y[comm.rank :: comm.size]) / y.size).backward()
        optimizer.step()
        return model.weight.data

    alone = after_a_step(serial(), lambda parameters, comm: SGD(parameters, lr=0.1))
    for weight in run_local(size, after_a_step, lambda parameters, comm: ZeroOptimizer(parameters, SGD, comm, lr=0.1)):
        np.testing.assert_allclose(weight, alone, rtol=1e-12)


@pytest.mark.parametrize("kind", MISTAKES)
def test_verify_catches_the_mistake(kind):
    """An unbroken run of each layout passes: see the first tests."""
    assert not any(verdict.passed for verdict in verdicts(3, MISTAKES[kind], kind))
