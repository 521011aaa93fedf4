"""Claims about ZeRO: every stage trains the same bits, sends what its formula says, and counts the norm once."""

from functools import lru_cache

import numpy as np
import pytest

from minipar.comm import DeviceMesh, run_local, serial, wire_bytes
from minipar.nn import GPT, GPTConfig, squared_norm
from minipar.nn.optim import BLOCK
from minipar.parallel import ZeroStage1, ZeroStage2, ZeroStage3, accumulate_replicas, shard
from minipar.train import trainer as trainer_module
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import bound, train_on_one_device, verify

# Buckets of 3,497 = 13*269 elements (embedding and head) and 2,197 = 13^3 (a block): no number of ranks divides one.
SHAPE = "--layers 1 --hidden 13 --heads 1 --seq-len 11 --dtype float64 --weight-decay 0.1 --steps 3"
TOKENS = load_tokens(None, vocab_size=256, seq_len=11)
CONFIG = GPTConfig(vocab_size=17, n_positions=8, n_embd=13, n_layer=3, n_head=1)
SHARDED = [1, 2, 3]  # stages that keep less than everything


def config_for(size, flags):
    return resolve(parse(f"{SHAPE} --global-batch {6 * size} {flags}".split()), size)


def bits(state, results):
    return {name: x.tobytes() for name, x in state.items()}, [(r.loss, r.grad_norm) for r in results]


def on_each_rank(size, flags, inspect):
    """What `inspect(trainer, step results)` returns on each rank after training."""
    config = config_for(size, flags)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), TOKENS)
        return inspect(trainer, list(trainer.train()))

    return run_local(size, rank)


def verdict_of(trainer, results):
    return verify(trainer, results, TOKENS)


def train(size, flags):
    """(bits of every parameter, every loss and gradient norm), the same on all ranks."""
    results = on_each_rank(size, flags, lambda trainer, results: bits(trainer.ddp.state_dict(), results))
    assert all(steps == results[0][1] for _, steps in results)
    return results[0]


@lru_cache(maxsize=1)
def one_device(size, flags):
    return bits(*train_on_one_device(config_for(size, flags), TOKENS))


def sharded(comm, stage, algorithm="ordered", **kwargs):
    """A small model of four buckets at a stage, or under a class."""
    model = GPT(CONFIG, dtype="float64", deferred=True)
    return shard(model, comm, stage, algorithm) if isinstance(stage, int) else stage(model, comm, algorithm, **kwargs)


def backward(ddp, rank, scale=1.0):
    """Forward and backward of two samples that belong to this rank; returns the loss."""
    rows = np.random.Generator(np.random.Philox(rank)).integers(0, 17, (2, 9))
    loss = ddp.model.loss_sum(rows[:, :8], rows[:, 1:])
    loss.backward(np.full_like(loss.data, scale))
    return loss.item()


def whole_gradient(ddp):
    """After `synchronize`, on every rank: the flat gradient, each rank's chunks in their places."""
    if ddp.stage == 0:
        return ddp.buffers.gradients.copy()
    full = np.empty(ddp.buffers.size)
    for bucket, chunk in ddp.chunks.items():
        ddp.comm.all_gather(chunk.gradient, out=full[bucket.start : bucket.stop], algorithm="pairwise")
    return full


def gradient_of_one_device(size, scale=1.0):
    ddp = sharded(serial(), 0)
    accumulate_replicas(ddp.buffers, range(size), lambda rank: backward(ddp, rank, scale))
    return ddp.buffers.gradients


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
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


@pytest.mark.parametrize("flags", ONE_DEVICE_FLAGS)
@pytest.mark.parametrize(
    ("size", "stages"), [(1, SHARDED), (2, [3]), (3, SHARDED), (4, [3]), (5, [3]), (6, [3]), (7, [2, 3]), (8, [3])]
)
def test_in_rank_order_every_stage_trains_one_devices_bits(size, stages, flags):
    for stage in stages:
        every = f"{flags} --reduction ordered"
        assert train(size, f"{every} --zero-stage {stage}") == one_device(size, every), f"stage {stage}"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_synchronizing_every_microbatch_is_one_device_that_adds_in_that_order(size, stage):
    """Microbatch 0 of all ranks, then microbatch 1 of all ranks, ...: other sums than rank by rank, so other bits."""
    flags = "--microbatches 3 --reduction ordered --clip-grad 0.5"
    every = f"{flags} --zero-stage {stage} --sync-every-microbatch"
    expected = one_device(size, every)
    assert train(size, every) == expected
    if size > 1:
        assert expected != bits(*train_on_one_device(config_for(size, flags), TOKENS))


@pytest.mark.parametrize("stage", SHARDED)
def test_in_a_ring_every_stage_agrees_with_one_device_within_the_bound(stage):
    for verdict in on_each_rank(3, f"--zero-stage {stage} --microbatches 2", verdict_of):
        assert verdict.passed and f"<= bound {bound('float64', 3):.3g}" in verdict.line, verdict.line


def test_prefetching_and_where_the_first_numbers_came_from_change_no_bit():
    def losses(comm, prefetch, deferred):
        ddp = ZeroStage3(GPT(CONFIG, dtype="float64", deferred=deferred), comm, prefetch=prefetch)
        loss = backward(ddp, comm.rank)
        ddp.synchronize()
        return loss, [x.tobytes() for x in ddp.state_dict().values()], whole_gradient(ddp).tobytes()

    expected = run_local(3, losses, True, True)
    assert run_local(3, losses, False, True) == run_local(3, losses, True, False) == expected


# ---- bytes -----------------------------------------------------------------------------------------------------------


def closed_forms(trainer, microbatches=1, syncs=1):
    """What a step sends, from the sizes of the buckets alone: {op: bytes} of this rank."""
    comm, stage, reduction = trainer.mesh.dp, trainer.ddp.stage, trainer.ddp.algorithm

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


@pytest.mark.parametrize("flags", ["--reduction ring", "--reduction ordered --dtype float32 --layers 2"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_a_step_sends_the_closed_form_and_not_a_byte_more(stage, size, flags):
    for sent, expected, _ in bytes_of_a_step(size, f"--zero-stage {stage} {flags}"):
        assert sent == expected


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize(("size", "hidden"), [(2, 24), (3, 24), (5, 20), (8, 24)])
def test_where_the_ranks_divide_every_bucket_a_step_sends_2_2_2_and_3_psi(stage, size, hidden):
    for sent, _, trainer in bytes_of_a_step(size, f"--hidden {hidden} --heads 2 --zero-stage {stage}"):
        assert all(bucket.size % size == 0 for bucket in trainer.ddp.buckets)
        scalars = (1 if stage == 0 else 2) * wire_bytes("all_reduce", "ordered", 1, 8, size, trainer.mesh.dp.rank)
        psi, volume = trainer.ddp.buffers.size, (2, 2, 2, 3)[stage]
        assert (sum(sent.values()) - scalars) * size == volume * psi * (size - 1) * 8


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [2, 5])
def test_microbatches_that_accumulate_are_reduced_once(size, stage):
    for sent, expected, _ in bytes_of_a_step(size, f"--microbatches 3 --zero-stage {stage}", microbatches=3):
        assert sent == expected


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_synchronizing_every_microbatch_reduces_as_many_times(size, stage):
    flags = f"--microbatches 3 --sync-every-microbatch --zero-stage {stage}"
    for sent, expected, _ in bytes_of_a_step(size, flags, microbatches=3, syncs=3):
        assert sent == expected


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_under_no_sync_gradients_add_up_and_nothing_is_sent_but_what_gathers(size, stage):
    def rank(comm):
        ddp = sharded(comm, stage)
        with ddp.no_sync():
            backward(ddp, comm.rank, 0.25)
            backward(ddp, comm.rank, 0.5)
        gathers = 2 * 2 * sum(wire_bytes("all_gather", "pairwise", b.size, 8, size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes() == comm.traffic.bytes("all_gather") == (gathers if stage == 3 else 0)
        comm.traffic.reset()
        backward(ddp, comm.rank, 0.25)
        ddp.synchronize()
        reduced = sum(wire_bytes("reduce_scatter", "ordered", b.size, 8, size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes("reduce_scatter") == reduced
        return whole_gradient(ddp)

    # 1/4 + 1/2 + 1/4: powers of two times the same numbers lose nothing, so three passes are one.
    for gradient in run_local(size, rank):
        np.testing.assert_allclose(gradient, gradient_of_one_device(size), rtol=1e-12, atol=1e-14)


# ---- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_norm_counts_each_element_once_and_clipping_scales_the_whole(size, stage):
    def rank(comm):
        ddp = sharded(comm, stage)
        backward(ddp, comm.rank)
        ddp.synchronize()
        before = whole_gradient(ddp)
        norm = ddp.clip_grad_norm(None)
        assert np.array_equal(whole_gradient(ddp), before)
        assert ddp.clip_grad_norm(0.5) == norm
        return before, norm, whole_gradient(ddp)

    expected = gradient_of_one_device(size)
    for before, norm, clipped in run_local(size, rank):
        assert before.tobytes() == expected.tobytes()
        assert norm == pytest.approx(np.linalg.norm(expected), rel=1e-14)
        np.testing.assert_allclose(clipped, expected * (0.5 / (norm + 1e-6)), rtol=1e-14)


def test_squares_are_summed_in_float64_array_after_array_and_block_after_block():
    assert squared_norm([]) == 0.0
    assert squared_norm([np.array([1e4, 1], np.float32)]) == 1e8 + 1  # in float32 the 1 would be lost
    # Beside 2^54 neighbouring numbers are 4 apart: 2.25 rounds up to 4, twice, but 4.5 once, to 4.
    large, small = np.array([2.0**27]), np.array([1.5])
    assert squared_norm(iter([large, small, small])) == 2.0**54 + 8
    assert squared_norm(iter([small, small, large])) == 2.0**54 + 4
    in_blocks = np.zeros(2 * BLOCK + 1)
    in_blocks[[0, BLOCK, 2 * BLOCK]] = 2.0**27, 1.5, 1.5
    assert squared_norm([in_blocks]) == 2.0**54 + 8


# ---- mistakes, made on purpose ---------------------------------------------------------------------------------------


class OwnChunkOnly(ZeroStage1):
    """The norm of what this rank holds: ranks then clip differently."""

    def _total(self, squares):
        return float(squares[0])


class EverythingOnEveryRank(ZeroStage1):
    """The norm of the whole flat array, summed over the ranks: numbers that were never reduced count too."""

    def _squares(self):
        return np.array([[[squared_norm([self.buffers.gradients]), 0.0]]])  # one rank, one bucket, nothing split


class NeverRefreshes(ZeroStage2):
    """Each rank updates its own chunks and never hears of the others'."""

    def refresh_parameters(self):
        pass


class ForgetsABucket(ZeroStage1):
    """The last bucket is never reduced: its chunk keeps this rank's own contribution."""

    def _start(self, bucket):
        if bucket is self.buckets[-1]:
            self.buffers.complete(bucket.parameters)
        else:
            super()._start(bucket)


class NothingDecays(ZeroStage1):
    """Shards are one-dimensional, and weight decay asks for two dims: of the whole parameter, not of the shard."""

    def __init__(self, *args):
        super().__init__(*args)
        for piece in self.optimized:
            piece.decays = False


class KeepsTheFirstSum(ZeroStage2):
    """What a second microbatch's reduce-scatter brings is never added to the first's."""

    def synchronize(self):
        self._late = []
        super().synchronize()


MISTAKES = {
    OwnChunkOnly: "--clip-grad 1",
    EverythingOnEveryRank: "--clip-grad 1",
    NeverRefreshes: "",
    ForgetsABucket: "",
    NothingDecays: "",
    KeepsTheFirstSum: "--microbatches 2 --sync-every-microbatch",
}


@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_verify_catches_the_mistake(kind, reduction, monkeypatch):
    def mistaken(model, comm, stage, algorithm, *rest, **kwargs):
        return kind(model, comm, algorithm) if stage else shard(model, comm, stage, algorithm, *rest, **kwargs)

    flags = f"--zero-stage {kind.stage} --reduction {reduction} {MISTAKES[kind]}"
    assert all(verdict.passed for verdict in on_each_rank(3, flags, verdict_of))
    monkeypatch.setattr(trainer_module, "shard", mistaken)
    assert all("FAILED" in verdict.line for verdict in on_each_rank(3, flags, verdict_of))
