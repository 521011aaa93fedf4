"""Claims about data parallelism: the ranks' gradients are one device's, bucketed or not, and nothing more is sent than
must be.
"""

import numpy as np
import pytest

from minipar.comm import run_local, wire_bytes
from minipar.nn import GPT, GPTConfig
from minipar.parallel import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    DistributedDataParallel,
    FlatBuffers,
    accumulate_replicas,
    all_reduce_gradients,
    global_token_count,
)

CONFIG = GPTConfig(vocab_size=13, n_positions=8, n_embd=16, n_layer=2, n_head=2)
SMALL_BUCKETS = {"bucket_bytes": 4000, "first_bucket_bytes": 1000}
SIZES = [1, 2, 3, 4, 5, 8]


def batch(samples, step=0):
    """Samples of a fixed text, chosen by their global number, as (n, T) inputs and targets."""
    text = np.random.Generator(np.random.Philox(7 + step)).integers(0, 13, (64, 9))
    rows = text[np.asarray(samples)]
    return rows[:, :8], rows[:, 1:]


def make(recompute=False):
    return GPT(CONFIG, dtype="float64", recompute=recompute)


def backward(model, samples, count):
    inputs, targets = batch(samples)
    loss = model.loss_sum(inputs, targets)
    loss.backward(np.full_like(loss.data, 1 / count))


def shard(rank, size, per_rank=2):
    return range(rank * per_rank, (rank + 1) * per_rank)


def on_one_device(size, per_rank=2, microbatches=1):
    """The flat gradient of one device that runs the same shards one after another."""
    model = make()
    buffers = FlatBuffers(model.parameters())

    def run(replica):
        samples = shard(replica, size, per_rank)
        step = per_rank // microbatches
        for m in range(microbatches):
            backward(model, samples[m * step : (m + 1) * step], size * per_rank * 8)

    accumulate_replicas(buffers, range(size), run)
    return buffers.gradients


def assert_bits(results, expected):
    for gradient in results:
        assert gradient.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_naive_gradients_in_rank_order_are_one_devices_bit_for_bit(size):
    def rank(comm):
        model = make()
        buffers = FlatBuffers(model.parameters())
        backward(model, shard(comm.rank, comm.size), comm.size * 2 * 8)
        all_reduce_gradients(buffers, comm, algorithm="ordered")
        return buffers.gradients

    assert_bits(run_local(size, rank), on_one_device(size))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("buckets", [{}, SMALL_BUCKETS])
@pytest.mark.parametrize("size", SIZES)
def test_bucketed_gradients_in_rank_order_are_one_devices_bit_for_bit(size, buckets, recompute):
    def rank(comm):
        model = make(recompute)
        ddp = DistributedDataParallel(model, comm, algorithm="ordered", **buckets)
        backward(model, shard(comm.rank, comm.size), comm.size * 2 * 8)
        ddp.synchronize()
        return ddp.buffers.gradients

    assert_bits(run_local(size, rank), on_one_device(size))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ring_gradients_agree_within_rounding_and_on_every_rank_bit_for_bit(size):
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, **SMALL_BUCKETS)
        backward(model, shard(comm.rank, comm.size), comm.size * 2 * 8)
        ddp.synchronize()
        return ddp.buffers.gradients

    results, expected = run_local(size, rank), on_one_device(size)
    assert_bits(results, results[0])
    assert np.abs(results[0] - expected).max() <= 1e-15 * np.abs(expected).max() * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_microbatches_accumulate_under_no_sync_and_are_sent_once(size):
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, algorithm="ordered", **SMALL_BUCKETS)
        samples = shard(comm.rank, comm.size, 6)
        with ddp.no_sync():
            backward(model, samples[0:2], comm.size * 6 * 8)
            backward(model, samples[2:4], comm.size * 6 * 8)
        assert comm.traffic.bytes() == 0
        backward(model, samples[4:6], comm.size * 6 * 8)
        ddp.synchronize()
        # One all-reduce of every bucket, and not one byte more.
        expected = sum(wire_bytes("all_reduce", "ordered", b.size, 8, comm.size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes("all_reduce") == comm.traffic.bytes() == expected
        return ddp.buffers.gradients

    assert_bits(run_local(size, rank), on_one_device(size, per_rank=6, microbatches=3))


def test_a_second_step_starts_from_zero_and_is_synchronized_too():
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, algorithm="ordered", **SMALL_BUCKETS)
        for _ in range(2):
            model.zero_grad()
            backward(model, shard(comm.rank, comm.size), comm.size * 2 * 8)
            ddp.synchronize()
        return ddp.buffers.gradients

    assert_bits(run_local(3, rank), on_one_device(3))


def test_buckets_start_while_backward_still_runs():
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, **SMALL_BUCKETS)
        started = []
        model.h[0].ln_1.weight.register_post_accumulate_grad_hook(lambda leaf: started.append(len(ddp._works)))
        backward(model, shard(comm.rank, comm.size), 1)
        in_backward = len(ddp._works)
        ddp.synchronize()
        return started[0], in_backward, len(ddp.buckets)

    for early, in_backward, total in run_local(2, rank):
        assert 0 < early < in_backward == total


def test_ranks_with_unequal_counts_give_the_mean_over_all_tokens():
    """Three ranks hold 8, 5 and 0 targets: the mean over 13 tokens, not the mean of the ranks' means."""

    def hide(targets, keep):
        targets = targets.copy().reshape(-1)
        targets[keep:] = -100
        return targets.reshape(1, 8)

    keeps = [8, 5, 0]

    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, **SMALL_BUCKETS)
        inputs, targets = batch([comm.rank])
        targets = hide(targets, keeps[comm.rank])
        count = global_token_count(comm, targets)
        loss = model.loss_sum(inputs, targets)
        loss.backward(np.full_like(loss.data, 1 / count))
        ddp.synchronize()
        return count, ddp.buffers.gradients

    model = make()
    buffers = FlatBuffers(model.parameters())
    inputs, targets = batch([0, 1, 2])
    model.loss(inputs, np.concatenate([hide(targets[i], keeps[i]) for i in range(3)])).backward()
    buffers.complete(buffers.members)
    for count, gradient in run_local(3, rank):
        assert count == 13
        np.testing.assert_allclose(gradient, buffers.gradients, rtol=1e-10, atol=1e-15)


def test_a_parameter_the_loss_does_not_use_counts_as_zero_on_every_rank():
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm, **SMALL_BUCKETS)
        ddp.buffers.gradients[...] = np.nan
        hidden = model.embed(batch([comm.rank])[0])
        hidden.sum().backward()
        ddp.synchronize()
        used = {"wte.weight", "wpe.weight"}
        return {name: p.grad.copy() for name, p in model.named_parameters() if name not in used}

    for gradients in run_local(2, rank):
        assert all(not gradient.any() for gradient in gradients.values())


def test_every_element_is_in_exactly_one_bucket_and_buckets_go_backwards():
    buffers = FlatBuffers(make().parameters())
    assert (BUCKET_BYTES, FIRST_BUCKET_BYTES) == (25 * 2**20, 2**20)
    assert len(buffers.buckets()) == 1
    buckets = buffers.buckets(**SMALL_BUCKETS)
    assert buckets[0].stop == buffers.size and buckets[-1].start == 0
    assert all(a.start == b.stop for a, b in zip(buckets, buckets[1:], strict=False))
    members = [p for bucket in buckets for p in reversed(bucket.parameters)]
    assert members == list(reversed(buffers.members))
    assert all(sum(p.size for p in b.parameters) == b.size for b in buckets)


def test_parameters_and_gradients_are_views_of_the_flat_arrays():
    model = make()
    before = model.state_dict()
    buffers = FlatBuffers(model.parameters())
    backward(model, [0, 1], 16)
    buffers.complete(buffers.members)
    for name, p in model.named_parameters():
        assert np.array_equal(p.data, before[name])
        assert np.shares_memory(p.data, buffers.parameters) and np.shares_memory(p.grad, buffers.gradients)
    with pytest.raises(ValueError, match="one dtype"):
        FlatBuffers([*model.parameters(), *GPT(CONFIG).parameters()])


@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_an_algorithm_whose_bits_depend_on_the_size_is_refused(algorithm):
    with pytest.raises(ValueError, match="expected ring or ordered"):
        run_local(2, lambda comm: DistributedDataParallel(make(), comm, algorithm=algorithm))


def test_detached_hooks_send_nothing():
    def rank(comm):
        model = make()
        ddp = DistributedDataParallel(model, comm)
        ddp.detach()
        backward(model, [0], 8)
        return comm.traffic.bytes()

    assert run_local(2, rank) == [0, 0]


class ForgetsTheFirstBucket(DistributedDataParallel):
    def _start(self, bucket):
        if bucket is not self.buckets[0]:
            super()._start(bucket)


def test_the_comparison_with_one_device_catches_a_forgotten_bucket_and_a_wrong_count():
    """The mistakes of chapter 3's exercises, made on purpose."""

    def rank(comm, kind, count):
        model = make()
        ddp = kind(model, comm, algorithm="ordered", **SMALL_BUCKETS)
        backward(model, shard(comm.rank, comm.size), count)
        ddp.synchronize()
        return ddp.buffers.gradients

    expected = on_one_device(2)
    assert_bits(run_local(2, rank, DistributedDataParallel, 32), expected)
    for gradient in run_local(2, rank, ForgetsTheFirstBucket, 32) + run_local(2, rank, DistributedDataParallel, 16):
        assert gradient.tobytes() != expected.tobytes()
