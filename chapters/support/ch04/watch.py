"""Watch data parallelism: a step on the model clock (sections 4.4, 4.7), runs with a mistake (4.5, 4.8)."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from chapters.support.ch04.sizes import by_size
from chapters.support.instruments import everywhere, same_bits, same_on_all_ranks
from chapters.support.model_clock import traced
from minipar.comm import Communicator, Network, serial
from minipar.nn import GPT, GPTConfig
from minipar.parallel.buckets import Bucket
from minipar.parallel.ddp import DistributedDataParallel
from visualize import Trace

# ---- the model clock -------------------------------------------------------------------------------------------------

DEVICES, SPEED = 8, 1e12  # the model clock's default speed: operations per second
NETWORK = Network(alpha=1e-6, beta=1 / 4e9)
MODEL = GPTConfig(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4)
FORWARD = 8 * 64 * sum(MODEL.segment_flops(64))
COMPUTATION = 3 * FORWARD / SPEED  # seconds of forward and backward
ELEMENTS = sum(parameter.size for parameter in GPT(MODEL, seed=None).parameters())


def all_reduce_seconds(elements: int, ranks: int, network: Network = NETWORK) -> float:
    """Compute 2(d-1)(alpha + beta n/d) of a ring over d ranks; n/d are the bytes of the largest chunk, in float32."""
    return 2 * (ranks - 1) * network.seconds(4 * -(-elements // ranks))


def bucket_shares(bucket_bytes: int) -> list[float]:
    """Return the part of all elements that each bucket of this size has, in the order in which they are sent."""
    groups = by_size(GPT(MODEL, seed=None), serial(), bucket_bytes, bucket_bytes)
    return [sum(parameter.size for parameter in group) / ELEMENTS for group, _ in reversed(groups)]


@dataclass(frozen=True)
class Step:
    """One step: the size of its buckets (None: one all-reduce after backward), their number, and the seconds."""

    bucket_bytes: int | None
    buckets: int
    seconds: float


@dataclass(frozen=True)
class Simulation:
    """The steps as rank 0 saw them, and the trace of all devices."""

    steps: list[Step]
    trace: Trace


def simulate(bucket_sizes: Sequence[int]) -> Simulation:
    """Run a naive step, then one for each size of a bucket, on simulated devices: threads of this process."""

    def steps(comm: Communicator) -> list[Step]:
        return [_step(comm, bucket_bytes) for bucket_bytes in (None, *bucket_sizes)]

    seen, trace = traced(DEVICES, steps, network=NETWORK)
    return Simulation(seen[0], trace)


def _step(comm: Any, bucket_bytes: int | None) -> Step:
    model = GPT(MODEL)
    for parameter in model.parameters():  # first: these hooks run before those that start the buckets
        seconds = 2 * FORWARD * parameter.size / ELEMENTS / SPEED
        parameter.register_post_accumulate_grad_hook(lambda leaf, seconds=seconds: comm.clock.advance(seconds))
    a_few = np.zeros((1, 4), int)  # what is really computed; the clock is charged for 8 samples of 64 tokens
    ddp = None
    if bucket_bytes is not None:
        ddp = DistributedDataParallel(model, comm, groups=by_size(model, comm, bucket_bytes, bucket_bytes))
    model.zero_grad()
    start = comm.clock.now()
    with comm.tracer.region("forward", flops=FORWARD):
        loss = model.loss_sum(a_few, a_few)
    # ddp.loss would send two values; the trainer, too, scales the loss by a count that it knows.
    with ddp.scaled_backward() if ddp else nullcontext(), comm.tracer.region("backward"):
        loss.backward(np.full_like(loss.data, 1.0))
    if ddp:
        ddp.synchronize()
    else:
        comm.all_reduce(np.concatenate([p.grad.reshape(-1) for p in model.parameters()]))
    seconds = comm.clock.now() - start
    with comm.tracer.region("optimizer", flops=12 * ELEMENTS):
        pass
    return Step(bucket_bytes, len(ddp.buckets) if ddp else 1, seconds)


# ---- planted mistakes ------------------------------------------------------------------------------------------------


class DropsABucket(DistributedDataParallel):
    """Mistake 3: the first bucket is "summed" over this rank alone."""

    def reduce(self, bucket: Bucket) -> None:
        self.contract.losses = 0  # or the second loss would be refused
        ranks = bucket.comm
        if bucket is self.buckets[0]:
            bucket.comm = serial()
        super().reduce(bucket)
        bucket.comm = ranks


class LocalCount(DistributedDataParallel):
    """Mistake 4: as if each rank had divided the sum of its losses by its own count, not by the global one."""

    def synchronize(self) -> None:
        super().synchronize()
        for bucket in self.buckets:
            bucket.gradient *= self.comm.size


class KeepsGradients(LocalCount):
    """Mistake 5: each rank steps on the mean gradient of its own samples; then `after_step` averages the parameters."""

    def reduce(self, bucket: Bucket) -> None:
        ranks = bucket.comm
        bucket.comm = serial()
        super().reduce(bucket)
        bucket.comm = ranks

    def after_step(self) -> None:
        for parameter in self.parameters():
            self.comm.all_reduce(parameter.data, algorithm="ordered")
            parameter.data /= self.comm.size


def without_no_sync(
    model: GPT, comm: Communicator, microbatches: Sequence[tuple[np.ndarray, np.ndarray]], forget: bool
) -> GPT:
    """Run backward for each microbatch and synchronize each time. `forget`: let the wrapper forget that it has."""
    ddp = DistributedDataParallel(model, comm, "ordered")
    for inputs, targets in microbatches:
        if forget:
            ddp.contract.forget_gradients()  # the optimizer's zero_grad calls it, and sets gradients to None as well
        (ddp.loss(inputs, targets) / len(microbatches)).backward()
    return model


@dataclass(frozen=True)
class Seen:
    """The instruments that objected to a run, how far its parameters are from one device's (relative), and its losses.

    The instruments are loss, ranks, bytes and one device.
    """

    caught: set[str]
    difference: float
    losses: Sequence[float]


def examine(
    comm: Communicator,
    train: Callable[[], tuple[np.ndarray, Sequence[float]]],
    parameters: np.ndarray,
    loss: float,
    nbytes: int,
) -> Seen:
    """Run `train`, which returns parameters and losses, and read the instruments; the same answer on every rank.

    `parameters` are one device's, `loss` is the right run's last, and `nbytes` is what this rank must send.
    """
    comm.traffic.reset()
    trained, losses = train()
    sent = comm.traffic.bytes("all_reduce")
    difference = np.array([np.abs(trained - parameters).max() / np.abs(parameters).max()])
    content = {
        "loss": abs(losses[-1] / loss - 1) <= 0.05,
        "ranks": same_on_all_ranks(comm, trained),
        "bytes": everywhere(comm, sent == nbytes),
        "one device": everywhere(comm, same_bits(trained, parameters)),
    }
    caught = {instrument for instrument, is_content in content.items() if not is_content}
    return Seen(caught, float(comm.all_reduce(difference, op="max")[0]), losses)
