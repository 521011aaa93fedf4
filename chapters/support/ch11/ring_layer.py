"""Train attention on plain arrays over the ranks of cp, right (section 11.8) and with mistakes (11.9).

The chapter builds the ring, and gives its three functions: held(r, c, order), the chunks of a rank; forward(comm, q,
kv, order); backward(comm, q, kv, out, lse, dout, order, short).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from chapters.support.whole_runs import relative_difference


class Ring(NamedTuple):
    """The chapter's functions."""

    held: Callable[..., tuple[int, int]]
    forward: Callable[..., tuple[np.ndarray, np.ndarray]]
    backward: Callable[..., tuple[np.ndarray, np.ndarray]]


def positions_of(chunks: Sequence[int], length: int, c: int) -> np.ndarray:
    """Return the positions, in a sample of `length` tokens, of the tokens of some of its 2c chunks: (2, T/2c)."""
    return np.arange(length).reshape(2 * c, -1)[list(chunks)]


def rotate(x: np.ndarray, positions: np.ndarray, sign: int = 1) -> np.ndarray:
    """Turn each pair of elements by its angle. x: (2, a_kv, ..., T/2c, h/a), positions: (2, T/2c)."""
    half = x.shape[-1] // 2
    angle = sign * positions[:, None, None, :, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate(turned, axis=-1)


@dataclass(frozen=True)
class Layer:
    """Causal attention over one sample x (T, h), and a loss: the mean of |o - y|^2 / 2 over its tokens."""

    ring: Ring
    x: np.ndarray
    y: np.ndarray
    kv_heads: int
    width: int  # elements of a head

    def split(self, x: np.ndarray) -> np.ndarray:
        """(2, T/2c, heads h/a) -> (2, a_kv, heads/a_kv, T/2c, h/a)."""
        return x.reshape(*x.shape[:2], self.kv_heads, -1, self.width).transpose(0, 2, 3, 1, 4)

    def join(self, x: np.ndarray) -> np.ndarray:
        """Undo `split`."""
        return x.transpose(0, 3, 1, 2, 4).reshape(2, x.shape[3], -1)

    def loss_and_gradients(
        self, comm: Any, weights: Sequence[np.ndarray], order: str = "zigzag", mistakes: Sequence[str] = ()
    ) -> tuple[float, list[np.ndarray]]:
        """Return the loss and the gradients of the weights of q, k and v, whole on every rank."""
        r, c, length = comm.rank, comm.size, len(self.x)

        def keys_and_values(own: np.ndarray, positions: np.ndarray) -> np.ndarray:
            k, v = (self.split(self.x[own] @ weight) for weight in weights[1:])
            return np.ascontiguousarray(np.stack([rotate(k, positions), v]))  # one message

        own = positions_of(self.ring.held(r, c, order), length, c)
        positions = np.arange(own.size).reshape(own.shape) if "positions" in mistakes else own
        q, kv = rotate(self.split(self.x[own] @ weights[0]), positions), keys_and_values(own, positions)
        out, lse = self.ring.forward(comm, q, kv, order)
        error = self.join(out) - self.y[own]  # (2, T/2c, h)
        loss = comm.all_reduce(np.array([(error**2).sum() / 2 / length]))[0]  # all tokens count, once
        dout = self.split(error) / length * (c if "loss" in mistakes else 1)
        if "stale" in mistakes:  # the buffer still holds what came last in forward: the right neighbour's
            right = positions_of(self.ring.held((r + 1) % c, c, order), length, c)
            kv = keys_and_values(right, right)
        dq, dkv = self.ring.backward(comm, q, kv, out, lse, dout, order, short="hop" in mistakes)
        gradients = (rotate(dq, positions, -1), rotate(dkv[0], positions, -1), dkv[1])
        columns = self.x[own].reshape(own.size, -1).T  # (h, T/c)
        return loss, [comm.all_reduce(columns @ self.join(g).reshape(own.size, -1)) for g in gradients]

    def train(
        self, comm: Any, weights: Sequence[np.ndarray], mistakes: Sequence[str] = (), steps: int = 30
    ) -> tuple[list[float], list[np.ndarray], int]:
        """Train with Adam. Return the losses, the gradients of the first step, and the bytes that its ring sent."""
        values = [weight.copy() for weight in weights]
        means, squares = ([np.zeros_like(weight) for weight in weights] for _ in range(2))
        losses, first, sent = [], [], 0
        for step in range(1, steps + 1):
            comm.traffic.reset()
            loss, gradients = self.loss_and_gradients(comm, values, mistakes=mistakes)
            if step == 1:
                first, sent = gradients, comm.traffic.bytes("send")
            losses.append(loss)
            for value, mean, square, gradient in zip(values, means, squares, gradients, strict=True):
                mean += 0.1 * (gradient - mean)
                square += 0.05 * (gradient**2 - square)
                value -= 0.02 * mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.95**step)) + 1e-12)
        return losses, first, sent


def notice(
    losses: Sequence[float], gradients: Sequence[np.ndarray], right_losses: Sequence[float], right: Sequence[np.ndarray]
) -> tuple[list[float], set[str]]:
    """Compare a run with one device. Return the lengths of its gradients in units of the right ones, and who notices.

    These are "loss" if the last one is off by more than 10 %, and "one device" if the first step's
    loss or a gradient differs beyond rounding.
    """
    ratios = [float((g * one).sum() / (one * one).sum()) for g, one in zip(gradients, right, strict=True)]
    apart = max(relative_difference(g, one) for g, one in zip(gradients, right, strict=True))
    noticed = set()
    if abs(losses[-1] / right_losses[-1] - 1) > 0.1:
        noticed.add("loss")
    if max(apart, abs(losses[0] / right_losses[0] - 1)) > 1e-12:
        noticed.add("one device")
    return ratios, noticed
