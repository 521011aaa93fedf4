"""Chapter 11's attention with the whole table: its gradients are differences of its output, and its memory is seen."""

import numpy as np
import pytest

from chapters.support.ch11.whole_table import full, full_backward, measure_memory_and_time


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_differences_of_the_output(which):
    random = np.random.default_rng(0)
    q, dout = random.normal(size=(2, 2, 3, 7, 4))  # 2 heads of keys, 6 of queries
    k, v = random.normal(size=(2, 2, 1, 7, 4))
    gradient = full_backward(q, k, v, full(q, k, v)[1], dout)[which]
    step = random.normal(size=gradient.shape)

    def loss(distance):
        arrays = [q, k, v]
        arrays[which] = arrays[which] + distance * step
        return (full(*arrays)[0] * dout).sum()

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert slope == pytest.approx((gradient * step).sum(), rel=1e-6)


def test_a_query_sees_no_later_key():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 5, 2))
    out, p = full(q, k, v)
    assert np.array_equal(p != 0, np.tri(5, dtype=bool)[None, None])
    v[..., 3:, :] = 100
    assert np.array_equal(full(q, k, v)[0][..., :3, :], out[..., :3, :])


def test_the_peak_is_that_of_the_arrays_and_they_are_passed():
    calls = []

    def forward(q, k, v, b):
        calls.append(("forward", q.shape, q.dtype, b))
        return q, np.ones(10**6)

    def backward(q, k, v, output, saved, dout, b):
        calls.append(("backward", output.shape, saved.size, b))

    peak, seconds = measure_memory_and_time(64, forward, backward, keeps_output=True, b=3)
    assert 8e6 <= peak < 8.1e6 and seconds > 0
    assert calls == 3 * [("forward", (4, 1, 64, 64), np.float32, 3), ("backward", (4, 1, 64, 64), 10**6, 3)]
