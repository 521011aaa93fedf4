"""The check of `--verify`: train the same steps on one device, and compare every parameter and every loss.

With `--reduction ordered` the two runs must agree bit for bit. With `ring` sums over ranks have another order, so the
runs agree up to rounding, and `bound` states how far rounding may go.
"""

import functools
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import serial
from minipar.memory import hold
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.checkpoint import same_sums
from minipar.train.config import TrainConfig
from minipar.train.data import Tokens
from minipar.train.trainer import StepResult, Trainer

OnStep = Callable[[StepResult], object]  # called after each step of the single device
Run = tuple[dict[str, np.ndarray], Sequence[StepResult]]  # the parameters after it, and the result of each step


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, and the line to print."""

    passed: bool
    line: str


def bound(dtype: str | np.dtype[Any], steps: int) -> float:
    """Return the largest relative difference after `steps` steps that rounding explains.

    It is 4500 machine epsilons for the first step (1e-12 in float64) and five times that for each further one, relative
    to the largest value of a layer: AdamW divides a gradient by its own size. Where the true gradient is zero (the bias
    of the keys), the update is rounding noise divided by `eps`.
    """
    return 4500 * float(np.finfo(dtype).eps) * (5 * steps - 4)


def relative_difference(a: np.ndarray, b: np.ndarray, scale: float | None = None) -> float:
    """Return max |a - b| / scale; the default scale is max |b|."""
    largest = float(np.abs(a - b).max(initial=0.0))
    return largest / (scale or float(np.abs(b).max())) if largest else 0.0


def layer_scales(state: dict[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the largest value in its layer: the bias of the keys alone is rounding noise."""
    layers: dict[str, float] = {}
    for name, array in state.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), float(np.abs(array).max(initial=0.0)))
    return {name: layers[name.rpartition(".")[0]] for name in state}


def compare(parallel_run: Run, single_run: Run, *, exact: bool, ranks: int) -> Verdict:
    """Compare the parameters, losses and gradient norms of two runs; `exact` demands the same bits.

    If the parallel run was resumed, its steps are compared with the last ones of the single run. The norms are compared
    because AdamW forgives a gradient of the wrong scale, which the parameters alone would hardly show.
    """
    (parallel, parallel_steps), (single, single_steps) = parallel_run, single_run
    pairs = {name: (parallel[name], single[name]) for name in single}
    count, resumed = len(parallel_steps), len(single_steps) - len(parallel_steps)
    for name, field in (("the losses", "loss"), ("the gradient norms", "grad_norm")):
        a, b = (np.array([getattr(step, field) for step in run]) for run in (parallel_steps, single_steps[resumed:]))
        pairs[name] = (a, b)
    elements = sum(array.size for array in single.values())
    steps, run = len(single_steps), f"{ranks} rank{'s' if ranks > 1 else ''}"
    compared = f"{len(single)} parameters ({elements:,} numbers), losses and gradient norms of {count} steps"
    compared += f", resumed after {resumed}" if resumed else ""
    if not all(np.isfinite(a).all() and np.isfinite(b).all() for a, b in pairs.values()):
        return Verdict(False, f"verify: FAILED: not all numbers are finite after {steps} steps, which proves nothing")
    different = [name for name, (a, b) in pairs.items() if a.tobytes() != b.tobytes()]
    if not different:
        return Verdict(True, f"verify: {run} = 1 device, bit for bit: {compared}")
    scales = layer_scales(single)
    differences = {name: relative_difference(*pairs[name], scales.get(name)) for name in different}
    worst = max(differences, key=lambda name: differences[name])
    largest, limit = differences[worst], bound(single[next(iter(single))].dtype, steps)
    if largest <= limit and not exact:
        rounding = f"largest relative difference {largest:.3g} (in {worst}) <= bound {limit:.3g}"
        return Verdict(True, f"verify: {run} = 1 device within rounding: {compared}; {rounding}")
    where = f"in {len(different)} of {len(pairs)} arrays, most in {worst}: relative difference {largest:.3g}"
    rule = ", but --reduction ordered promises the same bits" if exact else f" exceeds the bound {limit:.3g}"
    return Verdict(False, f"verify: FAILED: {run} differ from 1 device {where}{rule}")


def same_on_all_ranks(trainer: Trainer) -> bool:
    """Return True on every rank if ranks that hold the same parameters hold the same bits; or replicas of shards."""
    ddp: Any = trainer.ddp
    same = True
    for bucket in ddp.buckets if ddp.stage < 3 or ddp.replica_comm is not None else ():
        held = [p.data for p in bucket.parameters] if ddp.stage < 3 else [ddp.chunks[bucket].data]
        digest = hashlib.sha256(b"".join(to_host(array).tobytes() for array in held)).digest()
        holders = ddp.holders(bucket) if ddp.stage < 3 else ddp.replica_comm
        same &= len(set(holders.all_gather_bytes(digest))) == 1
    return b"no" not in trainer.mesh.world.all_gather_bytes(b"yes" if same else b"no")


def verify(
    trainer: Trainer, results: Sequence[StepResult], tokens: Tokens, on_step: OnStep = lambda result: None
) -> Verdict:
    """Train `trainer`'s configuration again on one device, on rank 0, and compare; every rank gets the verdict.

    The single device starts at step 0 even if `trainer` was resumed: a resumed run must equal one that never stopped.
    """
    config, comm = trainer.config, trainer.mesh.world
    if not same_on_all_ranks(trainer):
        return Verdict(False, "verify: FAILED: the ranks do not hold the same parameters as one another")
    verdict, parameters = Verdict(False, ""), trainer.state_dict()
    if comm.rank == 0:
        single = train_on_one_device(config, tokens, on_step)
        ordered = config.run.reduction == "ordered" and config.mesh.cp == config.mesh.ep == config.mesh.tp == 1
        exact = ordered and same_sums(trainer.checkpoint, config)
        verdict = compare((parameters, results), single, exact=exact, ranks=comm.size)
    with comm.engine.patient():
        return Verdict(*json.loads(comm.all_gather_bytes(json.dumps(astuple(verdict)).encode())[0]))


def train_on_one_device(config: TrainConfig, tokens: Tokens, on_step: OnStep = lambda result: None) -> Run:
    """Train the same steps on a mesh of one, nothing sharded; return the parameters and the result of each step."""
    single, results = OneDevice(config, tokens), []
    for result in single.train():
        results.append(result)
        on_step(result)
    return single.state_dict(), results


class OneDevice(Trainer):
    """A trainer that computes all replicas and microbatches one after another on one device, with the same sums.

    It adds the replicas' gradients in rank order, as the `ordered` all-reduce does, to the bit. That needs two more
    arrays of all gradients (three with `--sync-every-microbatch`, and one more for the groups of `--zero-replicas`).
    """

    def __init__(self, config: TrainConfig, tokens: Tokens) -> None:
        mesh = replace(config.mesh, cp=1, ep=1, tp=1, sequence_parallel=False, zero_stage=0, memory_limit=None)
        run = replace(config.run, reduce_dtype=config.run.gradients)  # what is summed below is not rounded again
        super().__init__(replace(config, mesh=mesh, run=run), DeviceMesh(serial()), tokens)
        self.reduce_dtype = config.run.reduce_dtype or config.run.dtype
        self.replicas = range(config.mesh.dp or 1)
        self.shards = len(self.replicas) // config.mesh.zero_replicas

    def _forward_backward(self, step: int) -> float:
        assert isinstance(self.ddp, DistributedDataParallel)
        losses = dict.fromkeys(self.replicas, 0.0)
        microbatches = range(self.config.data.microbatches)
        together = [[m] for m in microbatches] if self.config.mesh.sync_every_microbatch else [microbatches]
        buffer = self.ddp.buffers.gradients

        def gradient(replica: int, microbatches: Sequence[int]) -> Array:
            self.ddp.zero_grad()
            for m in microbatches:
                losses[replica] += self.backward_microbatch(step, replica, m)
            for bucket in self.ddp.buckets:
                bucket.complete()
            hold("buffers", copy := buffer.astype(self.reduce_dtype))
            return copy

        with self.ddp.no_sync():
            # Hybrid sharding sums first within groups of `shards` replicas, then over the groups.
            groups = [self.replicas[first : first + self.shards] for first in self.replicas[:: self.shards]]
            sums = (_sum(_sum(gradient(r, each) for r in group) for group in groups) for each in together)
            buffer[...] = _sum(each.astype(buffer.dtype, copy=False) for each in sums)
        self.ddp.synchronize()
        return float(_sum(iter(losses.values())))

    def _clip_grad_norm(self, max_norm: float | None) -> float:
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.mesh.dp, chunks=self.shards)


def _sum(values: Iterator[Any]) -> Any:
    """Add from left to right, in the first one's memory. The built-in sum would compensate rounding of floats."""
    return functools.reduce(operator.iadd, values)
