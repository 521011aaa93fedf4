"""The constants of this machine: the cost of computation (costs.py) and of a message. How well they predict steps.

All ranks work at once, since they share caches and memory. Pieces of a step are measured one by one in each rank's CPU
time, messages on the wall clock. Nothing is fitted to whole training steps. So the measured steps of many layouts show
how good the constants are.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from minipar.autograd.tensor import Tensor
from minipar.bench import add_sizes, publish
from minipar.bench.costs import BLOCK, BLOCKS, Machine, Shape, fit, fit_costs
from minipar.bench.layouts import agreement, measure, predict, runs_of
from minipar.comm.clock import Network
from minipar.comm.communicator import Communicator
from minipar.comm.threads import serial
from minipar.errors import UsageError
from minipar.more.context.blockwise import use_blockwise
from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.optim import AdamW
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.pipeline.stage import PipelineStage
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.wrap import shard

WARMUP = 1
HEADS = 8  # at the given hidden size; the others have heads of the same size
VOCABULARY = 256
# Factors of hidden and seq_len, samples, tp, sequence_parallel, factor of the vocabulary.
SHAPES: tuple[tuple[Any, ...], ...] = (
    (0.25, 0.5, 2), (0.25, 2, 4), (0.5, 1, 4), (0.5, 2, 4), (1, 1, 1), (1, 1, 4), (1, 1, 8), (1, 2, 4), (2, 1, 2),
    (2, 1, 4), (1, 1, 8, 2), (1, 1, 8, 8), (1, 1, 4, 4), (1, 1, 8, 4, True), (2, 1, 4, 2, True), (1, 1, 4, 1, False, 4),
    (1, 1, 32, 8), (1, 1, 32, 8, True), (1, 1, 16, 2, True),
)  # fmt: skip

MESSAGE_BYTES = (0, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
ROUND_TRIPS = 20  # measured for one message size at a time
MESSAGE_REPEAT = 9


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench machine`."""
    add_sizes(parser, hidden=256, seq_len=64, repeat=5)


def run(comm: Communicator, args: argparse.Namespace) -> None:
    """Measure this machine's constants, and with them predict steps of many layouts, next to measured ones."""
    if args.hidden % HEADS or args.seq_len % HEADS:
        raise UsageError(f"--hidden {args.hidden} --seq-len {args.seq_len}: expected multiples of {HEADS}")
    machine = calibrate(comm, args.hidden, args.seq_len, args.repeat)
    constants = {**machine.costs, "message_alpha": machine.network.alpha, "message_beta": machine.network.beta}
    if args.json != "-":
        publish(comm, [{"constant": name, "value": value} for name, value in constants.items()], None)
    sizes = f"--hidden {args.hidden} --heads {HEADS} --seq-len {args.seq_len} --vocab-size {VOCABULARY}"
    runs = runs_of(f"--layers 8 {sizes} --global-batch 32", comm.size)
    rows = measure(comm, runs, args.repeat, machine.network)
    for row, each in zip(rows, runs, strict=True):
        step, held = predict(each, machine)
        row |= {"predicted_seconds": step.total, "predicted_bytes": held.total}
    publish(comm, rows, args.json)
    if comm.rank == 0 and args.json != "-":
        print(f"{len(rows)} layouts: {agreement(rows)}")


def calibrate(comm: Communicator, hidden: int, seq_len: int, repeat: int) -> Machine:
    """Return the constants of this machine, the same on every rank. Collective over two ranks or more."""
    measured = [(shape, measure_pieces(comm, shape, repeat)) for shape in shapes(hidden, seq_len)]
    return Machine(fit_costs(measured), measure_messages(comm))


def shapes(hidden: int, seq_len: int) -> list[Shape]:
    """Return shapes around this hidden size and length."""

    def around(wide: float, long: float, samples: int, tp: int = 1, sequence: bool = False, words: int = 1) -> Shape:
        width, heads, length = int(hidden * wide), int(HEADS * wide), int(seq_len * long)
        return Shape(width, heads, length, samples, tp, sequence, VOCABULARY * words)

    return [around(*row) for row in SHAPES]


# ---- messages --------------------------------------------------------------------------------------------------------


def measure_messages(comm: Communicator) -> Network:
    """Return alpha and beta of a message between two ranks. Collective over two ranks or more.

    The ranks 0 and 1, 2 and 3, ... exchange messages at the same time; an odd rank is idle.
    """
    seconds = medians(comm, [_one_way(comm, nbytes) for nbytes in MESSAGE_BYTES])
    alpha, beta = fit([(1.0, float(nbytes)) for nbytes in MESSAGE_BYTES], seconds)
    return Network(alpha=alpha, beta=beta)


def _one_way(comm: Communicator, nbytes: int) -> float:
    """Return the median wall seconds of a message; the even rank sends first. An idle rank returns nan."""
    buffer = np.zeros(nbytes, np.uint8)
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return np.nan
    first, second = (comm.isend, comm.irecv) if comm.rank < peer else (comm.irecv, comm.isend)
    times = []
    for _ in range(MESSAGE_REPEAT):
        start = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            first(buffer, peer).wait()
            second(buffer, peer).wait()
        times.append((time.perf_counter() - start) / (2 * ROUND_TRIPS))
    return float(np.median(times))


def medians(comm: Communicator, values: list[float]) -> list[float]:
    """Return the median of each value over the ranks, without those that are nan. Collective."""
    gathered = comm.all_gather_bytes(np.array(values).tobytes())
    return list(np.nanmedian([np.frombuffer(each) for each in gathered], axis=0))


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
    return dict(zip(own, medians(comm, list(own.values())), strict=True))


def pieces(shape: Shape, repeat: int) -> dict[str, float]:
    """Measure the CPU seconds of each piece by itself, in flat buffers as in every run; medians over `repeat`.

    A tensor-parallel rank's piece sends no messages, but it computes and copies what it would among its group.

    F, I, W            one block: forward, and the two halves of backward, of a step's first microbatch
    W more             of the others, which add to the weight gradients
    embed F, embed B, head F, head B      the ends, the loss with the head (backward of the first microbatch)
    norm, AdamW        the gradient's norm and the update of all parameters (`parameters`)
    """
    model, ddp = _build(shape)
    random = np.random.Generator(np.random.Philox(0))
    inputs, targets = random.integers(0, shape.vocab_size, (2, shape.samples, shape.seq_len))
    length = shape.seq_len // shape.tp if shape.sequence_parallel else shape.seq_len
    x = random.standard_normal((shape.samples, length, shape.hidden), dtype=np.float32)
    gradient = x / np.float32(targets.size)
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
            for weight in ("W", "W more"):
                timed("F", blocks.forward, 0, Tensor(x, requires_grad=True))
                timed("I", blocks.backward_input, 0, gradient)
                timed(weight, blocks.backward_weight, 0)
            ddp.zero_grad()
            y = timed("embed F", model.segments[0].run, inputs)
            timed("head F", ends.forward, 0, Tensor(x, requires_grad=True), loss)
            timed("head B", ends.backward, 0, one)
            timed("embed B", y.backward, gradient)
        ddp.synchronize()
        timed("norm", clip_grad_norm, ddp.parameters(), None, ddp.comm, ddp.comm)
        timed("AdamW", optimizer.step)
    seconds_of = {piece: float(np.median(times[WARMUP:])) for piece, times in seconds.items()}
    for piece in BLOCK:
        seconds_of[piece] /= BLOCKS
    return seconds_of | {"parameters": float(sum(p.size for p in ddp.parameters()))}


def _build(shape: Shape) -> tuple[GPT, Any]:
    config = GPTConfig(shape.vocab_size, shape.seq_len, shape.hidden, BLOCKS, shape.heads)
    model = use_blockwise(GPT(config))
    if shape.tp == 1:
        return model, shard(model, serial(), 0)
    group: Any = LocalGroup(shape.tp)
    tensor = tensor_parallel(model, group, sequence=shape.sequence_parallel)
    return model, shard(model, serial(), 0, before_reduce=tensor.sum_partial)
