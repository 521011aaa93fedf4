"""Claims about data parallelism: the ranks' gradients are one device's, and nothing more is sent than must be."""

import numpy as np
import pytest
from training import MLP, Proxy, TiedModel, backward, bits, gradient_of, gradient_on_one_device, small_gpt, text

from minipar.comm import run_local, serial, wire_bytes
from minipar.nn import Parameter
from minipar.parallel.ddp import DistributedDataParallel


def share(rank, count=2):
    return range(rank * count, (rank + 1) * count)


def on_one_device(size, count=2, microbatches=1):
    """The gradient of one device that runs the ranks' shares one after another."""

    def replica(rank):
        def run(model):
            for samples in np.split(np.array(share(rank, count)), microbatches):
                backward(model, *text(samples), 1 / (size * count * 8))

        return run

    return bits(gradient_on_one_device(small_gpt(), map(replica, range(size))))


def wrapped(comm, algorithm="ordered", recompute=False, size=3):
    """Wrap a model in buckets of so many parameters, or of its units if size is None."""
    model = small_gpt(recompute=recompute)
    parameters = model.parameters()
    groups = None
    if size is not None:
        groups = [(parameters[i : i + size], comm) for i in range(0, len(parameters), size)]
    return DistributedDataParallel(model, comm, algorithm, groups=groups)


def one_pass(ddp, scale=None):
    """Run a pass over this rank's share; return the gradient's bits by name."""
    comm = ddp.comm
    backward(ddp, *text(share(comm.rank)), 1 / (comm.size * 2 * 8) if scale is None else scale)
    ddp.synchronize()
    return bits(gradient_of(ddp))


@pytest.mark.parametrize(
    ("size", "bucket", "recompute"),
    [(1, 3, False), (2, None, False), (3, 3, True), (4, 3, False), (5, None, True), (8, 3, False)],
)
def test_bucketed_gradients_are_one_devices_bit_for_bit(size, bucket, recompute):
    results = run_local(size, lambda comm: one_pass(wrapped(comm, recompute=recompute, size=bucket)))
    assert results == [on_one_device(size)] * size


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ring_gradients_agree_within_rounding_and_on_every_rank(size):
    results, expected = run_local(size, lambda comm: one_pass(wrapped(comm, algorithm="ring"))), on_one_device(size)
    assert results == [results[0]] * size
    flat, exact = (np.frombuffer(b"".join(gradient.values())) for gradient in (results[0], expected))
    assert np.abs(flat - exact).max() <= 1e-15 * np.abs(exact).max() * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_microbatches_accumulate_under_no_sync_and_are_sent_once(size):
    def rank(comm):
        ddp = wrapped(comm)
        first, second, third = (text(samples) for samples in np.split(np.array(share(comm.rank, 6)), 3))
        with ddp.no_sync():
            backward(ddp, *first, 1 / (size * 6 * 8))
            backward(ddp, *second, 1 / (size * 6 * 8))
        assert comm.traffic.bytes() == 0
        backward(ddp, *third, 1 / (size * 6 * 8))
        ddp.synchronize()
        # One all-reduce of every bucket, and not one byte more.
        expected = sum(wire_bytes("all_reduce", "ordered", b.size, 8, comm.size, comm.rank) for b in ddp.buckets)
        assert comm.traffic.bytes("all_reduce") == comm.traffic.bytes() == expected
        return bits(gradient_of(ddp))

    assert run_local(size, rank) == [on_one_device(size, count=6, microbatches=3)] * size


def test_a_second_step_starts_from_zero_and_is_synchronized_too():
    def rank(comm):
        ddp = wrapped(comm)
        one_pass(ddp)
        ddp.zero_grad()
        return one_pass(ddp)

    assert run_local(3, rank) == [on_one_device(3)] * 3


def test_buckets_start_while_backward_still_runs():
    def rank(comm):
        started, early = [], []
        ddp = wrapped(comm)
        ddp.before_reduce = started.append
        weight = ddp.model.h[0].ln_1.weight
        weight.register_post_accumulate_grad_hook(lambda leaf: early.append(len(started)))
        backward(ddp, *text(share(comm.rank)))
        in_backward = len(started)
        ddp.synchronize()
        return early[0], in_backward, len(ddp.buckets)

    for early, in_backward, total in run_local(2, rank):
        assert 0 < early < in_backward == total


def test_a_bucket_waits_for_the_leaf_that_is_tied_to_a_parameter():
    x, y = np.random.Generator(np.random.Philox(9)).standard_normal((2, 6, 4))
    alone = TiedModel()
    alone.loss(x, y).backward()
    expected = alone.weight.grad + alone.leaf.grad

    def rank(comm):
        ddp = DistributedDataParallel(TiedModel(), comm)
        ddp.loss(x[comm.rank :: 2], y[comm.rank :: 2]).backward()
        return ddp.model.weight.grad

    for gradient in run_local(2, rank):
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-14)


def test_a_flat_array_of_two_dtypes_is_refused():
    model = MLP()
    model.first.bias = Parameter(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match=r"float32.*float64"):
        DistributedDataParallel(model, serial())


class SkipsTheFirst(Proxy):
    """A communicator whose first all-reduce leaves the array as it is."""

    calls = 0

    def all_reduce(self, array, **options):
        self.calls += 1
        return self.comm.all_reduce(array.copy() if self.calls == 1 else array, **options)


def test_a_forgotten_bucket_and_a_wrong_count_are_caught():
    """The mistakes of chapter 4's exercises, made on purpose: one bucket is all-reduced among this rank alone."""

    expected = on_one_device(2)
    assert run_local(2, lambda comm: one_pass(wrapped(comm))) == [expected] * 2
    for wrong in run_local(2, lambda comm: one_pass(wrapped(SkipsTheFirst(comm)))):
        assert wrong != expected
    for wrong in run_local(2, lambda comm: one_pass(wrapped(comm), scale=1 / 16)):
        assert wrong != expected
