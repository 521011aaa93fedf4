"""Chapter 11's layer on one rank, with attention on the whole table in the place of the ring."""

import numpy as np
import pytest

from chapters.support.ch11.ring_layer import Layer, Ring, rotate
from chapters.support.ch11.whole_table import full, full_backward
from minipar.comm import serial

T, H, KV_HEADS, WIDTH = 8, 8, 2, 2


def whole(x):
    """(2, heads, ..., T/2, h/a) -> (heads, ..., T, h/a)."""
    return np.concatenate(list(x), axis=-2)


def chunks(x):
    return np.stack(np.split(x, 2, axis=-2))


def forward(comm, q, kv, order):
    output, table = full(whole(q), *map(whole, kv))
    return chunks(output), table


def backward(comm, q, kv, out, table, dout, order, short=False):
    dq, dk, dv = full_backward(whole(q), *map(whole, kv), table, whole(dout))
    return chunks(dq), np.stack([chunks(dk), chunks(dv)])


@pytest.fixture
def layer():
    x, y = np.random.default_rng(0).normal(size=(2, T, H))
    return Layer(Ring(lambda r, c, order: (0, 1), forward, backward), x, y, KV_HEADS, WIDTH)


def weights():
    random = np.random.default_rng(1)
    return [random.normal(size=(H, columns)) for columns in (H, KV_HEADS * WIDTH, KV_HEADS * WIDTH)]


@pytest.mark.parametrize("which", range(3))
def test_gradients_are_differences_of_the_loss(layer, which):
    values = weights()
    gradient = layer.loss_and_gradients(serial(), values)[1][which]
    step = np.random.default_rng(2).normal(size=gradient.shape)

    def loss(distance):
        moved = list(values)
        moved[which] = values[which] + distance * step
        return layer.loss_and_gradients(serial(), moved)[0]

    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx((gradient * step).sum(), rel=1e-6)


def test_training_lowers_the_loss_and_keeps_the_weights(layer):
    values = weights()
    losses, first, sent = layer.train(serial(), values)
    assert losses[-1] < losses[0] / 2 and sent == 0 and len(losses) == 30
    assert all(np.array_equal(one, other) for one, other in zip(values, weights(), strict=True))
    right = layer.loss_and_gradients(serial(), values)[1]
    assert all(np.array_equal(one, other) for one, other in zip(first, right, strict=True))


def test_scores_of_rotated_vectors_know_distances_alone():
    q, k = np.random.default_rng(4).normal(size=(2, 1, 1, 1, 1, 6))
    scores = [(rotate(q, np.array([[m]])) * rotate(k, np.array([[n]]))).sum() for m, n in ((3, 1), (12, 10), (3, 2))]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12) and scores[0] != pytest.approx(scores[2], rel=1e-3)
    assert np.allclose(rotate(rotate(q, np.array([[5]])), np.array([[5]]), -1), q, rtol=1e-12)
