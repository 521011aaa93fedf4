"""Compute attention with the whole table of scores (11.2, 11.3), and measure it on one device (11.4)."""

import tracemalloc
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np

HEADS, WIDTH = 4, 64  # the size of the attention that is measured


def full(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the output and the probabilities of causal attention. q: (a_kv, a/a_kv, T, h/a), k, v: (a_kv, 1, ...)."""
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5  # (..., T, T)
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, p


def full_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, p: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of q, k and v."""
    dp = dout @ v.swapaxes(-1, -2)  # (..., T, T)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * q.shape[-1] ** -0.5
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    return ds @ k, dk.sum(axis=-3, keepdims=True), dv.sum(axis=-3, keepdims=True)


def measure_memory_and_time(
    length: int, forward: Callable[..., Any], backward: Callable[..., Any], keeps_output: bool = False, **options: Any
) -> tuple[int, float]:
    """Run attention forward and backward in float32. Return the peak of its memory in bytes, and seconds of processor.

    forward(q, k, v, **options) returns the output and what backward needs besides: backward(q, k, v, saved, dout), or
    backward(q, k, v, output, saved, dout) if it `keeps_output`. The four arrays given are not counted.
    """
    q, k, v, dout = np.random.default_rng(0).normal(size=(4, HEADS, 1, length, WIDTH)).astype(np.float32)

    def run() -> None:
        output, saved = forward(q, k, v, **options)
        kept = (output, saved) if keeps_output else (saved,)
        backward(q, k, v, *kept, dout, **options)

    seconds = []
    for _ in range(2):
        begin = thread_time()
        run()
        seconds.append(thread_time() - begin)
    tracemalloc.start()
    try:
        run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak, min(seconds)
