"""Claims about ZeRO: every stage trains the same bits, sends what its formula says, and counts the norm once."""

import math
from functools import lru_cache

import numpy as np
import pytest
import training
from training import (
    Done,
    NeverGathersTheUpdate,
    NothingDecays,
    OwnChunksNorm,
    Proxy,
    TiedModel,
    backward,
    bits,
    gradient_of,
    gradient_on_one_device,
    reports,
    small_gpt,
    talk_through,
    text,
)

from minipar import nn
from minipar.comm import DeviceMesh, chunk_bounds, run_local, serial, wire_bytes
from minipar.nn import SGD, squared_norm
from minipar.nn.optim import BLOCK
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.parallelize import shard
from minipar.parallel.zero_optimizer import ZeroOptimizer
from minipar.train.data import load_tokens
from minipar.train.one_device import train_on_one_device
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.sampled(3)

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
    state, results = train_on_one_device(config_for(size, flags), TOKENS)
    return bits(state), reports(results)


def own_samples(model, rank, scale=1.0):
    """Run forward and backward of two samples that belong to this rank; return the loss."""
    return backward(model, *text([2 * rank, 2 * rank + 1]), scale)


def gradient_of_all_ranks(size):
    return gradient_on_one_device(small_gpt(), [lambda model, r=r: own_samples(model, r) for r in range(size)])


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize(
    "size", [2, 3, pytest.param(5, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)]
)
def test_all_stages_train_the_same_bits_for_20_steps(size, reduction, clip):
    flags = f"--global-batch {size} --steps 20 --reduction {reduction} --clip-grad {clip} --zero-stage"
    state, steps = train(size, f"{flags} 0")
    assert len(state) == 16 and len(steps) == 20
    assert steps[0][1] > 1 and steps[0][0] > steps[-1][0]  # clipping clips, and the model learns
    for stage in SHARDED:
        assert train(size, f"{flags} {stage}") == (state, steps), f"stage {stage}"


ONE_DEVICE_FLAGS = [
    "--microbatches 3 --recompute full --clip-grad 0.5",
    "--dtype float32 --layers 2 --lr-schedule cosine --warmup-steps 1",
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("flags", ONE_DEVICE_FLAGS)
@pytest.mark.parametrize(
    ("size", "stages"), [(1, SHARDED), (2, [3]), (3, SHARDED), (4, [3]), (5, [3]), (6, [3]), (7, [2, 3]), (8, [3])]
)
def test_in_rank_order_every_stage_trains_one_devices_bits(size, stages, flags):
    for stage in stages:
        every = f"{flags} --reduction ordered"
        assert train(size, f"{every} --zero-stage {stage}") == one_device(size, every), f"stage {stage}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
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
    for verdict in verdicts(3, f"--zero-stage {stage} --microbatches 2"):
        assert verdict.passed and "bound 3.6e-15; updates equal" in verdict.line, verdict.line


def test_prefetching_and_deferred_values_change_no_bit():
    def losses(comm, prefetch, deferred):
        ddp = FullyShardedDataParallel(small_gpt(deferred=deferred), comm, prefetch=prefetch)
        loss = own_samples(ddp, comm.rank)
        ddp.synchronize()
        return loss, bits(ddp.state_dict()), bits(gradient_of(ddp))

    expected = run_local(3, losses, True, True)
    assert run_local(3, losses, False, True) == run_local(3, losses, True, False) == expected


# ---- bytes -----------------------------------------------------------------------------------------------------------


def closed_forms(trainer, microbatches=1, syncs=1):
    """What a step sends, from the sizes of the buckets alone: {op: bytes} of this rank."""
    comm, stage, reduction = trainer.mesh.dp, trainer.config.mesh.zero_stage, trainer.ddp.algorithm

    def over_buckets(op, algorithm):
        itemsize = np.dtype(trainer.config.run.dtype).itemsize
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", ["--reduction ring", "--reduction ordered --dtype float32 --layers 2"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_a_step_sends_the_closed_form_and_not_a_byte_more(stage, size, flags):
    for sent, expected, _ in bytes_of_a_step(size, f"--zero-stage {stage} {flags}"):
        assert sent == expected


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize(("size", "hidden"), [(2, 24), (3, 24), (5, 20), (8, 24)])
def test_ranks_that_divide_every_bucket_send_2_2_2_and_3_psi(stage, size, hidden):
    for sent, _, trainer in bytes_of_a_step(size, f"--hidden {hidden} --heads 2 --zero-stage {stage}"):
        assert all(bucket.size % size == 0 for bucket in trainer.ddp.buckets)
        scalars = (1 if stage == 0 else 2) * wire_bytes("all_reduce", "ordered", 1, 8, size, trainer.mesh.dp.rank)
        psi, volume = trainer.size, (2, 2, 2, 3)[stage]
        assert (sum(sent.values()) - scalars) * size == volume * psi * (size - 1) * 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [2, 5])
def test_microbatches_that_accumulate_are_reduced_once(size, stage):
    for sent, expected, _ in bytes_of_a_step(size, f"--microbatches 3 --zero-stage {stage}", microbatches=3):
        assert sent == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_synchronizing_every_microbatch_reduces_as_many_times(size, stage):
    flags = f"--microbatches 3 --sync-every-microbatch --zero-stage {stage}"
    for sent, expected, _ in bytes_of_a_step(size, flags, microbatches=3, syncs=3):
        assert sent == expected


@pytest.mark.sampled(1)
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


def test_zero_optimizer_drops_gradients_from_before():
    """Those of a tied embedding's second leaf, too."""

    def rank(comm, before):
        model = small_gpt()
        if before:
            own_samples(model, comm.rank)
        optimizer = ZeroOptimizer(model.parameters(), SGD, comm, lr=0.1)
        own_samples(model, comm.rank)
        optimizer.step()
        return bits({name: p.data for name, p in model.named_parameters()})

    assert run_local(2, rank, True) == run_local(2, rank, False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_under_no_sync_gradients_add_up_and_none_is_sent(size, stage):
    def rank(comm):
        ddp = shard(small_gpt(deferred=True), comm, stage, "ordered")
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_norm_counts_each_element_once_and_clips_the_whole(size, stage):
    def rank(comm):
        ddp = shard(small_gpt(deferred=True), comm, stage, "ordered")
        own_samples(ddp, comm.rank)
        ddp.synchronize()
        before = gradient_of(ddp)
        norm = ddp.clip_grad_norm(None)
        assert bits(gradient_of(ddp)) == bits(before)
        assert ddp.clip_grad_norm(0.5) == norm
        return before, norm, gradient_of(ddp)

    expected = gradient_of_all_ranks(size)
    exact = np.linalg.norm(np.concatenate([array.reshape(-1) for array in expected.values()]))
    for before, norm, clipped in run_local(size, rank):
        assert bits(before) == bits(expected)
        assert norm == pytest.approx(exact, rel=1e-14)
        for name, array in expected.items():
            np.testing.assert_allclose(clipped[name], array * (0.5 / (norm + 1e-6)), rtol=1e-14)


def test_squares_are_summed_in_float64_block_after_block():
    assert squared_norm([]) == 0.0
    assert squared_norm([np.array([1e4, 1], np.float32)]) == 1e8 + 1  # in float32 the 1 would be lost
    # Next to 2^54 neighbouring values are 4 apart: 2.25 rounds up to 4, twice, but 4.5 once, to 4.
    large, small = np.array([2.0**27]), np.array([1.5])
    assert squared_norm(iter([large, small, small])) == 2.0**54 + 8
    assert squared_norm(iter([small, small, large])) == 2.0**54 + 4
    in_blocks = np.zeros(2 * BLOCK + 1)
    in_blocks[[0, BLOCK, 2 * BLOCK]] = 2.0**27, 1.5, 1.5
    assert squared_norm([in_blocks]) == 2.0**54 + 8


# ---- mistakes, made on purpose ---------------------------------------------------------------------------------------


class EverythingOnEveryRank(Trainer):
    """The norm of the whole flat array, summed over the ranks: values that were never reduced count too."""

    def _clip_grad_norm(self, max_norm):
        own = squared_norm([bucket.gradient for bucket in self.ddp.buckets])
        squares = self.mesh.dp.all_reduce(np.array([own]), algorithm="ordered")
        return nn.clip_grad_norm(self.ddp.parameters(), max_norm, norm=math.sqrt(squares[0]))


class ForgetsABucket(Trainer):
    """The second of two buckets is never reduced: its chunk keeps this rank's own contribution."""

    class Comm(Proxy):
        calls = 0

        def reduce_scatter(self, full, out, **options):
            self.calls += 1
            if self.calls % 2:
                return self.comm.reduce_scatter(full, out=out, **options)
            start, stop = chunk_bounds(full.size, self.size)[self.rank]
            out[...] = full[start:stop].copy()
            return Done(out)

    def __init__(self, *args):
        super().__init__(*args)
        talk_through(self.Comm, self.ddp)


class KeepsTheFirstSum(Trainer):
    """Nothing is added to the first microbatch's sum: the reduce-scatter of the second brings zeros."""

    class Comm(Proxy):
        calls = 0

        def reduce_scatter(self, full, **options):
            self.calls += 1
            return self.comm.reduce_scatter(full * (self.calls % 4 in (1, 2)), **options)  # two buckets each

    def __init__(self, *args):
        super().__init__(*args)
        talk_through(self.Comm, self.ddp)


MISTAKES = {
    OwnChunksNorm: "--zero-stage 1 --clip-grad 1",
    EverythingOnEveryRank: "--zero-stage 1 --clip-grad 1",
    NeverGathersTheUpdate: "--zero-stage 2",
    ForgetsABucket: "--zero-stage 1",
    NothingDecays: "--zero-stage 1",
    KeepsTheFirstSum: "--zero-stage 2 --microbatches 2 --sync-every-microbatch",
}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_zero_optimizer_sums_tied_gradients_too(size):
    """Of a model that computes its gradients by itself; its parameters may have ties, as GPT-2's embedding has."""
    x, y = np.random.Generator(np.random.Philox(9)).standard_normal((2, 6, 4))

    def after_a_step(comm, make):
        model = TiedModel()
        optimizer = make(model.parameters(), comm)
        (model.loss_sum(x[comm.rank :: comm.size], y[comm.rank :: comm.size]) / y.size).backward()
        optimizer.step()
        return model.weight.data

    alone = after_a_step(serial(), lambda parameters, comm: SGD(parameters, lr=0.1))
    for weight in run_local(size, after_a_step, lambda parameters, comm: ZeroOptimizer(parameters, SGD, comm, lr=0.1)):
        np.testing.assert_allclose(weight, alone, rtol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_verify_catches_the_mistake(kind, reduction):
    flags = f"{MISTAKES[kind]} --reduction {reduction}"
    assert all(verdict.passed for verdict in verdicts(3, flags))
    assert all("FAILED" in verdict.line for verdict in verdicts(3, flags, kind))
