"""Watch the ZeRO stages: memory, bytes and bits (5.5, 5.9), the model clock (5.6, 5.11), mistakes (5.10)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from chapters.support.instruments import everywhere, same_bits, same_on_all_ranks
from minipar.comm import Network, run_local, wire_bytes
from minipar.memory import KINDS, MemoryLedger
from minipar.more.hybrid import HybridComm
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.fsdp import FullyShardedDataParallel, Unit
from minipar.parallel.wrap import shard
from minipar.parallel.wrapper import DataParallel
from minipar.parallel.zero import ZeroStage1

# ---- what a run holds and sends --------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training run on this rank: the wrapper, its optimizer, losses and norms, the ledger, and what was sent.

    The ledger's moments and `sent`, the bytes by operation, are those of the last step. `bits` are all parameters,
    losses and norms.
    """

    wrapper: DataParallel
    optimizer: Any  # alive, so that the ledger's sums are those after the step
    losses: Sequence[float]
    norms: Sequence[float]
    ledger: MemoryLedger
    held: dict[str, int]  # bytes by kind after the last step
    sent: dict[str, int]
    bits: np.ndarray

    @property
    def state(self) -> tuple[int, ...]:
        """Bytes of parameters, gradients and optimizer state after the step."""
        return tuple(self.held[kind] for kind in KINDS[:3])

    @property
    def model_state(self) -> int:
        return sum(self.state)

    @property
    def moments(self) -> list[tuple[str, tuple[int, ...]]]:
        return self.ledger.moments

    def most(self, kind: str) -> int:
        """Return the most bytes of a kind that were held in the last step."""
        return max(held[KINDS.index(kind)] for _, held in self.ledger.moments)


def watch(train: Callable[[], tuple[DataParallel, Any, Sequence[float], Sequence[float]]]) -> Run:
    """Record a run. All ranks call it: stage 3 gathers the parameters, for their bits."""
    ledger = MemoryLedger()
    with ledger.recording():
        wrapper, optimizer, losses, norms = train()
    sent = {op: nbytes for (op, _), (_, nbytes) in wrapper.comm.traffic.counts.items() if nbytes}
    held = dict(ledger.held)
    parameters = wrapper.model.parameters()
    values = [wrapper.gather_parameter(parameter) for parameter in parameters]
    bits = np.concatenate([*map(np.ravel, values), losses, norms])
    return Run(wrapper, optimizer, losses, norms, ledger, held, sent, bits)


def expected_bytes(wrapper: DataParallel, microbatches: int = 1, reductions: int = 1) -> dict[str, int]:
    """Return the bytes that this rank must send in a step, by operation, with losses and a norm in float64.

    `reductions` is how often the gradients are summed. Stage 3 gathers twice for each microbatch.
    """
    ranks, rank = wrapper.comm.size, wrapper.comm.rank

    def total(op: str, algorithm: str, sizes: Sequence[int]) -> int:
        return sum(wire_bytes(op, algorithm, size, 8, ranks, rank) for size in sizes)

    sizes = [bucket.size for bucket in wrapper.buckets]
    values = microbatches * total("all_reduce", "ordered", [2])  # sum of losses and count
    if isinstance(wrapper, DistributedDataParallel):
        expected = {"all_reduce": total("all_reduce", "ordered", sizes) + values}
    else:
        gathers = 2 * microbatches if isinstance(wrapper, FullyShardedDataParallel) else 1
        expected = {
            "reduce_scatter": reductions * total("reduce_scatter", "ordered", sizes),
            "all_gather": gathers * total("all_gather", "pairwise", sizes),
            "all_reduce": values + total("all_reduce", "ordered", [1]),  # the norm
        }
    return {op: count for op, count in expected.items() if count}


# ---- the model clock -------------------------------------------------------------------------------------------------

DEVICES, SPEED, BATCH, LENGTH = 4, 1e12, 8, 64
MODEL = GPTConfig(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4)
HEAD = 2 * BATCH * LENGTH * MODEL.n_embd * MODEL.vocab_size  # operations in forward; backward takes twice as many
BLOCK = (BATCH * LENGTH * sum(MODEL.segment_flops(LENGTH)) - HEAD) // MODEL.n_layer
COMPUTATION = 3 * (HEAD + MODEL.n_layer * BLOCK) / SPEED  # seconds of forward and backward


@dataclass(frozen=True)
class Step:
    """One step on the model clock: its seconds, and the messages and bytes that rank 0 sends."""

    seconds: float
    messages: int
    bytes: int


def simulate(stage: int, prefetch: bool, bytes_per_second: float) -> Step:
    """Run a step at a ZeRO stage on simulated devices, threads of this process; alpha is a microsecond."""
    network = Network(alpha=1e-6, beta=1 / bytes_per_second)
    steps: list[Step] = run_local(DEVICES, _step, stage, prefetch, 1, clock="model", network=network)
    return steps[0]


def simulate_hosts(stage: int, replicas: int, inside: float, between: float) -> Step:
    """Run a step on 8 simulated devices, two hosts of 4; bandwidths in bytes per second inside and between hosts."""
    network = Network(alpha=1e-6, beta=1 / inside, between=Network(alpha=5e-6, beta=1 / between), per_host=4)
    steps: list[Step] = run_local(8, _step, stage, True, replicas, clock="model", network=network)
    return steps[0]


def _step(comm: Any, stage: int, prefetch: bool, replicas: int) -> Step:
    a_few = np.zeros((1, 4), int)  # what is really computed; the clock is charged for BATCH samples of LENGTH tokens
    model = GPT(MODEL)
    for segment in model.segments[1:-1]:
        _charge(comm.tracer, segment, BLOCK, [p for p in segment.parameters if p.ndim == 2])
    _charge(comm.tracer, model.segments[-1], HEAD, [model.ln_f.weight])
    wrapper = shard(model, HybridComm(comm, replicas), stage)  # type: ignore[arg-type]
    wrapper.prefetch = prefetch  # type: ignore[attr-defined]  # stages 0 to 2 have nothing to prefetch
    comm.traffic.reset()
    start = comm.clock.now()
    loss = model.loss_sum(a_few, a_few)
    with wrapper.scaled_backward():  # so that no message sums the loss
        loss.backward(np.full_like(loss.data, 1.0))
    wrapper.synchronize()
    wrapper.after_step()
    return Step(comm.clock.now() - start, comm.traffic.messages(), comm.traffic.bytes())


def _charge(tracer: Any, segment: Any, flops: int, matrices: Sequence[Any]) -> None:
    """Let a segment take this many operations in forward, and in backward twice, as its matrices' gradients arrive."""

    def charged(x: Any, run: Any = segment.run) -> Any:
        with tracer.region("forward", flops):
            return run(x)

    def completed(leaf: Any) -> None:
        with tracer.region("backward", 2 * flops * leaf.size / size):
            pass

    segment.run, size = charged, sum(p.size for p in matrices)
    for matrix in matrices:
        matrix.register_post_accumulate_grad_hook(completed)


# ---- planted mistakes ------------------------------------------------------------------------------------------------


class NoGather(ZeroStage1):
    """Mistake 2: nobody gathers the updated parameters."""

    def after_step(self) -> None:
        self.contract.losses = 0  # or the next loss would be refused


class OffByOne(ZeroStage1):
    """Mistake 3: the optimizer's chunk of the parameters begins one element too early."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.contract.values = {}  # or a step would be refused, because the arrays are others
        for bucket in self.buckets:
            chunk = bucket.chunk
            first = max(bucket.own.start - 1, 0)
            chunk.data = bucket.values[first : first + chunk.data.size]
            start = 0
            for part in chunk.shards:
                part.data = chunk.data[start : start + part.size]
                start += part.size


class NeverFrees(FullyShardedDataParallel):
    """Mistake 4: stage 3 gathers a unit, and its parameters keep referring to the gathered array."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for unit in self.buckets:
            unit.reshard = partial(keep, unit)  # type: ignore[method-assign]


def keep(unit: Unit) -> None:
    """Forget that a unit is gathered, and leave its parameters as they are."""
    unit.gathering = None


def examine(run: Run, plain: Run, right: Run) -> set[str]:
    """Return the instruments that object to a run; the same answer on every rank.

    `plain` is the run at stage 0, whose bits it should have, and `right` the right run at the same stage.
    """
    comm = run.wrapper.comm
    parameters = run.bits[: -len(run.losses) - len(run.norms)]
    content = {
        "loss": abs(run.losses[-1] / plain.losses[-1] - 1) <= 0.05,
        "ranks": same_on_all_ranks(comm, parameters),
        "bits": everywhere(comm, same_bits(run.bits, plain.bits)),
        "bytes": everywhere(comm, run.sent == right.sent),
        "ledger": everywhere(comm, run.held == right.held),
    }
    return {instrument for instrument, is_content in content.items() if not is_content}
