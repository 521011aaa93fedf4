"""The constants of this machine: the cost of computation (costs.py) and of a message.

All ranks work at once, since they share caches and memory. Pieces of a step are measured one by one in each rank's CPU
time, messages on the wall clock. Nothing is fitted to whole training steps. Shapes to which no constant was fitted show
how good the constants are.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from minipar.autograd.tensor import Tensor
from minipar.bench import publish
from minipar.bench.costs import BLOCK, BLOCKS, SUMS, Shape, fit, fit_costs
from minipar.comm.clock import Network
from minipar.comm.communicator import Communicator
from minipar.comm.threads import serial
from minipar.errors import UsageError
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.optim import AdamW
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.pipeline.stage import PipelineStage
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.wrap import shard

COLUMNS = (
    "row", "name", "value", "unit", "hidden", "seq_len", "samples", "tp", "sequence_parallel", "fitted", "bytes",
    "seconds", "predicted", "ratio",
)  # fmt: skip
WARMUP = 1
HEADS = 8  # at the middle hidden size; the others have heads of the same size
# Shapes around the middle: factors of hidden and seq_len, samples, tp, sequence_parallel, factor of the vocabulary.
FITTED: tuple[tuple[Any, ...], ...] = (
    (0.25, 0.5, 2), (0.25, 2, 4), (0.5, 1, 4), (0.5, 2, 4), (1, 1, 1), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 1, 2),
    (2, 1, 4), (1, 1, 8, 2), (1, 1, 8, 8), (1, 1, 4, 4), (1, 1, 8, 4, True), (2, 1, 4, 2, True), (1, 1, 4, 1, False, 4),
    (1, 1, 32, 8), (1, 1, 32, 8, True), (1, 1, 16, 2, True),
)  # fmt: skip
CHECKED: tuple[tuple[Any, ...], ...] = (
    (0.5, 1, 2), (0.5, 1, 8), (1, 0.5, 4), (1, 1, 2), (1, 2, 2), (2, 0.5, 2), (1, 1, 8, 4), (1, 1, 4, 2), (1, 1, 4, 8),
    (2, 1, 8, 4, True), (1, 2, 2, 2, False, 2),
)  # fmt: skip

UNITS = {
    "byte": "kept byte", "block": "block and pass", "logit": "element of logits", "hidden": "element of hidden",
    "call": "pass", "parameter": "parameter", "tensor": "tensor",
}  # fmt: skip


MESSAGE_BYTES = (0, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
ROUND_TRIPS = 20  # measured for one message size at a time
MESSAGE_REPEAT = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench machine`."""
    parser.add_argument("--hidden", type=int, default=256, help="middle of the hidden sizes, a multiple of 8 (256)")
    parser.add_argument("--seq-len", type=int, default=64, help="middle of the sequence lengths, a multiple of 4 (64)")
    parser.add_argument("--vocab-size", type=int, default=256, help="least number of tokens that exist (256)")
    parser.add_argument("--repeat", type=int, default=3, help="times that each piece is measured (3)")


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure this machine's constants: rate of products, seconds per byte, call and message; how well they predict.

    Publish a row for each constant, for each piece and shape, and on several ranks for each message size.
    """
    if args.repeat < 1 or args.vocab_size < HEADS:
        raise UsageError(f"--repeat {args.repeat} --vocab-size {args.vocab_size}: expected at least 1 and {HEADS}")
    if args.hidden < 1 or args.hidden % HEADS or args.seq_len < 1 or args.seq_len % 4:
        raise UsageError(f"--hidden {args.hidden} --seq-len {args.seq_len}: expected multiples of {HEADS} and 4")
    publish(comm, measure(comm, args.hidden, args.seq_len, args.vocab_size, args.repeat), args.json)


def shapes(hidden: int, seq_len: int, vocab_size: int) -> list[tuple[Shape, bool]]:
    """Return the shapes around this hidden size and length, and whether constants are fitted to each."""

    def around(wide: float, long: float, samples: int, tp: int = 1, sequence: bool = False, words: int = 1) -> Shape:
        width, heads, length = int(hidden * wide), int(HEADS * wide), int(seq_len * long)
        return Shape(width, heads, length, samples, tp, sequence, vocab_size * words)

    return [(around(*row), row in FITTED) for row in FITTED + CHECKED]


def measure(comm: Communicator, hidden: int, seq_len: int, vocab_size: int, repeat: int) -> list[dict[str, Any]]:
    """Measure all rows, the same on every rank. Collective.

    row "constant": name, value, unit
    row "piece":    CPU seconds of a piece for a shape, next to the predicted ones
    row "message":  seconds of a message in one direction, by its bytes
    """
    times = [
        (shape, fitted, measure_pieces(comm, shape, repeat)) for shape, fitted in shapes(hidden, seq_len, vocab_size)
    ]
    costs = fit_costs([(shape, seconds) for shape, fitted, seconds in times if fitted])
    rows = [_row("constant", name, value=value, unit=_unit(name)) for name, value in asdict(costs).items()]
    messages: list[dict[str, Any]] = []
    if comm.size > 1:
        network, messages = measure_messages(comm)
        rows.append(_row("constant", "message_alpha", value=network.alpha, unit="seconds"))
        rows.append(_row("constant", "message_beta", value=network.beta, unit="seconds per byte"))
    for shape, fitted, seconds in times:
        for piece in (name for name in seconds if name != "parameters"):
            predicted = costs.seconds(piece, shape, seconds["parameters"])
            rows.append(_row("piece", piece, fitted=fitted, **_compared(seconds[piece], predicted), **asdict(shape)))
    return rows + messages


def _row(row: str, name: str, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"row": row, "name": name} | values


def _compared(seconds: float, predicted: float) -> dict[str, float]:
    return {"seconds": seconds, "predicted": predicted, "ratio": predicted / seconds}


def _unit(constant: str) -> str:
    """Return the unit of a constant of Costs."""
    return "FLOP/s" if constant == "flops_per_second" else f"seconds per {UNITS[constant.rsplit('_', 1)[1]]}"


# ---- messages --------------------------------------------------------------------------------------------------------


def measure_messages(comm: Communicator) -> tuple[Network, list[dict[str, Any]]]:
    """Return alpha and beta of a message between two ranks, and a row for each message size.

    Collective over two ranks or more. The ranks 0 and 1, 2 and 3, ... exchange messages at the same time; an odd rank
    is idle. The sizes alternate. Times are medians over MESSAGE_REPEAT, then over the pairs.
    """
    buffers = [np.zeros(nbytes, np.uint8) for nbytes in MESSAGE_BYTES]
    peer = comm.rank ^ 1
    times = np.zeros((MESSAGE_REPEAT, len(buffers)))
    for row in times:
        for i, buffer in enumerate(buffers):
            comm.barrier()
            if peer < comm.size:
                row[i] = _ping_pong(comm, buffer, peer) / (2 * ROUND_TRIPS)
    every = np.zeros((comm.size, len(buffers)))
    every[comm.rank] = np.median(times, axis=0)
    comm.all_reduce(every)
    seconds = np.median(every[: comm.size // 2 * 2], axis=0).tolist()
    alpha, beta = fit([(1.0, float(nbytes)) for nbytes in MESSAGE_BYTES], seconds).tolist()
    network = Network(alpha=alpha, beta=beta)
    rows = [
        _row("message", "one way", bytes=nbytes, **_compared(one_way, network.seconds(nbytes)))
        for nbytes, one_way in zip(MESSAGE_BYTES, seconds, strict=True)
    ]
    return network, rows


def _ping_pong(comm: Communicator, buffer: np.ndarray, peer: int) -> float:
    """Return the wall seconds of ROUND_TRIPS; the even rank sends first."""
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        if comm.rank < peer:
            comm.isend(buffer, peer).wait()
            comm.irecv(buffer, peer).wait()
        else:
            comm.irecv(buffer, peer).wait()
            comm.isend(buffer, peer).wait()
    return time.perf_counter() - start


# ---- pieces ----------------------------------------------------------------------------------------------------------


class LocalGroup:
    """A fake Communicator, rank 0 of `size`, that sends nothing: sums are the rank's own part."""

    rank = 0
    axis = "tp"

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = range(size)
        recorder = serial()  # layers set aside what their comparisons count; here nobody reads it
        self.clock = recorder.clock
        self.traffic = recorder.traffic
        self.tracer = recorder.tracer

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return as many copies of the bytes as there are ranks."""
        return [data] * self.size

    def all_reduce(self, x: np.ndarray, **options: str) -> np.ndarray:
        """Return x."""
        return x

    def all_gather(self, chunk: np.ndarray, **options: str) -> np.ndarray:
        """Return zeros of the gathered size."""
        return np.zeros(chunk.size * self.size, chunk.dtype)

    def reduce_scatter(self, x: np.ndarray, **options: str) -> np.ndarray:
        """Return zeros of a chunk's size."""
        return np.zeros(x.size // self.size, x.dtype)


def measure_pieces(comm: Communicator, shape: Shape, repeat: int) -> dict[str, float]:
    """Measure `pieces` on all ranks at once, as in a run, and return the medians over the ranks. Collective."""
    comm.barrier()
    own = pieces(shape, repeat)
    every = np.zeros((comm.size, len(own)))
    every[comm.rank] = list(own.values())
    comm.all_reduce(every)
    return dict(zip(own, np.median(every, axis=0).tolist(), strict=True))


def pieces(shape: Shape, repeat: int) -> dict[str, float]:
    """Measure the CPU seconds of each piece by itself, in flat buffers as in every run; medians over `repeat`.

    A tensor-parallel rank's piece sends no messages, but it computes and copies what it would among its group.

    F, B, I, W         one block: forward; backward, whole and in halves, of a step's first microbatch
    B more, W more     of the others, which add to the weight gradients
    embed F, embed B, head F, head B      the ends, the loss with the head (backward of the first microbatch)
    norm, AdamW        the gradient's norm and the update of all parameters (`parameters`)
    """
    model, ddp = _build(shape)
    inputs, targets, x, gradient = _arrays(shape)
    seconds: dict[str, list[float]] = defaultdict(list)
    blocks, ends = PipelineStage(model.segments[1:-1]), PipelineStage(model.segments[-1:])
    optimizer = AdamW(ddp.parameters())
    one = np.full((), 1 / targets.size, dtype=np.float32)

    def timed(piece: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return call(*arguments) and record its CPU time on this thread."""
        start = time.thread_time()
        result = call(*arguments)
        seconds[piece].append(time.thread_time() - start)
        return result

    def loss(logits: Tensor) -> Tensor:
        return model.criterion(logits, targets)

    for _ in range(WARMUP + repeat):
        ddp.zero_grad()
        with ddp.no_sync(), ddp.scaled_backward():
            for more in ("", " more"):
                timed("F", blocks.forward, 0, Tensor(x, requires_grad=True))
                timed("B" + more, blocks.backward, 0, gradient)
            ddp.zero_grad()
            for more in ("", " more"):
                timed("F", blocks.forward, 0, Tensor(x, requires_grad=True))
                timed("I", blocks.backward_input, 0, gradient)
                timed("W" + more, blocks.backward_weight, 0)
            ddp.zero_grad()
            y = timed("embed F", model.segments[0].run, inputs)
            timed("head F", ends.forward, 0, Tensor(x, requires_grad=True), loss)
            timed("head B", ends.backward, 0, one)
            timed("embed B", y.backward, gradient)
        ddp.synchronize()
        timed("norm", clip_grad_norm, ddp.parameters(), None, ddp.comm, ddp.comm)
        timed("AdamW", optimizer.step)
    medians = {piece: float(np.median(times[WARMUP:])) for piece, times in seconds.items()}
    for piece in (*BLOCK, *SUMS):
        medians[piece] /= BLOCKS
    return medians | {"parameters": float(sum(p.size for p in ddp.parameters()))}


def _build(shape: Shape) -> tuple[GPT, Any]:
    config = GPTConfig(shape.vocab_size, shape.seq_len, shape.hidden, BLOCKS, shape.heads)
    model = GPT(config)
    if shape.tp == 1:
        return model, shard(model, serial(), 0)
    group: Any = LocalGroup(shape.tp)
    tensor = tensor_parallel(model, group, sequence=shape.sequence_parallel)
    return model, shard(model, serial(), 0, before_reduce=tensor.sum_partial)


def _arrays(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens and targets (B, T), and a block's input and its gradient, (B, T, h) or (B, T/t, h)."""
    random = np.random.Generator(np.random.Philox(0))
    length = shape.seq_len // shape.tp if shape.sequence_parallel else shape.seq_len
    size = (shape.samples, length, shape.hidden)
    inputs, targets = random.integers(0, shape.vocab_size, (2, shape.samples, shape.seq_len))
    x, gradient = (random.standard_normal(size, dtype=np.float32) for _ in range(2))
    return inputs, targets, x, gradient / np.float32(targets.size)
