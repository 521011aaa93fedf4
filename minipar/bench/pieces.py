"""What the pieces of a training step take in CPU seconds, each measured by itself: a block's passes, the embedding, the
head with its loss, the optimizer.

They are minipar's own, in flat buffers as in every run. A tensor-parallel rank's piece is measured without the others:
its messages go nowhere and take no time (Alone), what it computes and copies is as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.autograd import Tensor
from minipar.comm import Communicator, serial
from minipar.comm.work import Finished
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel.fully_sharded import shard
from minipar.parallel.pipeline import PipelineStage
from minipar.parallel.tensor import tensor_parallel

BLOCKS = 4  # one after another, so that each finds its weights where training finds them: not in the nearest cache
WARMUP = 1


@dataclass(frozen=True)
class Shape:
    """One microbatch on one of `tp` ranks. `samples` of `seq_len` tokens; `vocab_size` matters to the ends only."""

    hidden: int
    heads: int
    seq_len: int
    samples: int
    tp: int = 1
    sequence_parallel: bool = False
    vocab_size: int = 256


class Alone:
    """In the place of the first of `size` ranks' Communicator: messages are never sent, sums are the own part."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: np.ndarray, async_op: bool = False, **how: str) -> Any:
        return Finished(x) if async_op else x

    def all_gather(self, chunk: np.ndarray, **how: str) -> np.ndarray:
        return np.zeros(chunk.size * self.size, chunk.dtype)

    def reduce_scatter(self, x: np.ndarray, async_op: bool = False, **how: str) -> Any:
        return Finished(np.zeros(x.size // self.size, x.dtype))


class Stopwatch:
    """CPU seconds of this thread, by name; the median of many."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(*arguments), timed."""
        start = time.thread_time()
        result = call(*arguments)
        self.seconds.setdefault(name, []).append(time.thread_time() - start)
        return result

    def medians(self) -> dict[str, float]:
        """Without the first WARMUP of each."""
        return {name: float(np.median(seconds[WARMUP:])) for name, seconds in self.seconds.items()}


def measure(comm: Communicator, shape: Shape, repeat: int) -> dict[str, float]:
    """CPU seconds of each piece of `pieces`, medians over `repeat`, then over the ranks. Collective: all are at it at
    once, as in a run.
    """
    comm.barrier()
    mine = pieces(shape, repeat)
    every = np.zeros((comm.size, len(mine)))
    every[comm.rank] = list(mine.values())
    comm.all_reduce(every)
    return dict(zip(mine, np.median(every, axis=0).tolist(), strict=True))


def pieces(shape: Shape, repeat: int) -> dict[str, float]:
    """CPU seconds, medians over `repeat`.

    F, B, I, W         of one block: forward; backward whole and in halves, of a step's first microbatch
    B more, W more     of the others, whose weight gradients are added to those before
    embed F, embed B, head F, head B      of the ends, the loss with the head (backward of the first microbatch)
    norm, AdamW        of the gradient's norm and the update, on all parameters (`parameters`)
    """
    model, ddp = _build(shape)
    inputs, targets, x, gradient = _arrays(shape)
    watch = Stopwatch()
    blocks, ends = PipelineStage(model.parts[1:-1]), PipelineStage(model.parts[-1:])
    optimizer = AdamW(ddp.optimized)
    one = np.full((), 1 / targets.size, dtype=np.float32)

    def loss(logits: Tensor) -> Tensor:
        return model.criterion(logits, targets)

    for _ in range(WARMUP + repeat):
        with ddp.no_sync():
            ddp.zero_grad()
            for more in ("", " more"):
                watch.time("F", blocks.forward, 0, x)
                watch.time("B" + more, blocks.backward, 0, gradient)
            ddp.zero_grad()
            for more in ("", " more"):
                watch.time("F", blocks.forward, 0, x)
                watch.time("I", blocks.backward_input, 0, gradient)
                watch.time("W" + more, blocks.backward_weight, 0)
            ddp.zero_grad()
            y = watch.time("embed F", model.parts[0].run, inputs)
            watch.time("head F", ends.forward, 0, x, loss)
            watch.time("head B", ends.backward, 0, one)
            watch.time("embed B", y.backward, gradient)
        ddp.synchronize()
        watch.time("norm", ddp.clip_grad_norm, None)
        watch.time("AdamW", optimizer.step)
    found = watch.medians()
    for name in ("F", "B", "I", "W", "B more", "W more"):
        found[name] /= BLOCKS
    return found | {"parameters": float(sum(p.size for p in ddp.optimized))}


def _build(shape: Shape) -> tuple[GPT, Any]:
    config = GPTConfig(shape.vocab_size, shape.seq_len, shape.hidden, BLOCKS, shape.heads)
    model, tensor = GPT(config, deferred=True), None
    if shape.tp > 1:
        group: Any = Alone(shape.tp)
        tensor = tensor_parallel(model, group, sequence=shape.sequence_parallel)
    return model, shard(model, serial(), 0, tensor=tensor)


def _arrays(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and targets (B, T), activations into a block and their gradient, (B, T, h) or with sequence parallelism
    (B, T/t, h).
    """
    random = np.random.Generator(np.random.Philox(0))
    length = shape.seq_len // shape.tp if shape.sequence_parallel else shape.seq_len
    size = (shape.samples, length, shape.hidden)
    inputs, targets = random.integers(0, shape.vocab_size, (2, shape.samples, shape.seq_len))
    x, gradient = (random.standard_normal(size, dtype=np.float32) for _ in range(2))
    return inputs, targets, x, gradient / np.float32(targets.size)
