"""The check of `--verify`: train the same steps on one device, and compare every parameter and every loss.

With `--reduction ordered` the two runs must agree bit for bit. With `ring` sums over ranks have another order, so the
runs agree up to rounding, and `bound` states how far rounding may go.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minipar.backend import Array, to_host
from minipar.comm.communicator import DeviceMesh
from minipar.comm.threads import serial
from minipar.memory import hold
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train.config import TrainConfig
from minipar.train.data import Tokens
from minipar.train.resume import same_sums
from minipar.train.trainer import StepResult, Trainer

OnStep = Callable[[StepResult], object]  # called after each step of the single device


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, and the line to print."""

    passed: bool
    line: str


def bound(dtype: str, steps: int) -> float:
    """Return the largest relative difference after `steps` steps that rounding explains.

    It is 4500 machine epsilons for the first step (1e-12 in float64) and five times that for each further one (1e-10
    after 20), relative to the largest value of a layer. It is so far above one epsilon because AdamW divides a gradient
    by its own size: if the true gradient is zero (the bias of the keys), the update is rounding noise divided by `eps`.
    """
    return 4500 * float(np.finfo(dtype).eps) * (5 * steps - 4)


def relative_difference(a: np.ndarray, b: np.ndarray, scale: float | None = None) -> float:
    """Return max |a - b| / scale; the default scale is max |b|."""
    largest = float(np.abs(a - b).max(initial=0.0))
    return largest / (float(np.abs(b).max()) if scale is None else scale) if largest else 0.0


def layer_scales(state: dict[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the largest value in its layer: the bias of the keys alone is rounding noise."""
    layers: dict[str, float] = {}
    for name, array in state.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), float(np.abs(array).max(initial=0.0)))
    return {name: layers[name.rpartition(".")[0]] for name in state}


def compare(
    parallel: dict[str, np.ndarray],
    single: dict[str, np.ndarray],
    parallel_steps: Sequence[StepResult],
    single_steps: Sequence[StepResult],
    *,
    exact: bool,
    ranks: int,
    dtype: str,
) -> Verdict:
    """Compare the parameters, losses and gradient norms of two runs; `exact` demands the same bits.

    If the parallel run was resumed, its steps are compared with the last ones of the single run. The norms are compared
    because AdamW forgives a gradient of the wrong scale, which the parameters alone would hardly show.
    """
    pairs = {name: (parallel[name], single[name]) for name in single}
    count, resumed = len(parallel_steps), len(single_steps) - len(parallel_steps)
    for name, field in (("the losses", "loss"), ("the gradient norms", "grad_norm")):
        a, b = (np.array([getattr(step, field) for step in run]) for run in (parallel_steps, single_steps[resumed:]))
        pairs[name] = (a, b)
    elements = sum(array.size for array in single.values())
    steps, run = len(single_steps), f"{ranks} rank{'s' if ranks > 1 else ''}"
    failed = f"verify: FAILED: {run} differ from 1 device"
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
    largest, limit = differences[worst], bound(dtype, steps)
    if exact:
        where = f"in {len(different)} of {len(pairs)} arrays, most in {worst}: relative {largest:.3g}"
        return Verdict(False, f"{failed} {where}, but --reduction ordered promises the same bits")
    if largest <= limit:
        rounding = f"largest relative difference {largest:.3g} (in {worst}) <= bound {limit:.3g}"
        return Verdict(True, f"verify: {run} = 1 device within rounding: {compared}; {rounding}")
    excess = f"relative difference {largest:.3g} in {worst} exceeds the bound {limit:.3g}"
    return Verdict(False, f"{failed} by more than rounding: {compared}; {excess}")


def same_on_all_ranks(trainer: Trainer) -> bool:
    """Return True on every rank if the ranks of each dp axis hold the same bits; at ZeRO stage 3 they share none."""
    digest = hashlib.sha256()
    if trainer.ddp.stage < 3:
        for bucket in trainer.ddp.buckets:
            for p in bucket.parameters:
                digest.update(np.ascontiguousarray(to_host(p.data)).data)
    same = len(set(trainer.mesh.dp.all_gather_bytes(digest.digest()))) == 1
    return b"no" not in trainer.mesh.world.all_gather_bytes(b"yes" if same else b"no")


def verify(trainer: Trainer, results: Sequence[StepResult], tokens: Tokens, on_step: OnStep | None = None) -> Verdict:
    """Train `trainer`'s configuration again on one device, on rank 0, and compare; every rank gets the verdict.

    The single device starts at step 0 even if `trainer` was resumed: a resumed run must equal one that never stopped.
    `on_step` is called on rank 0 after each step of the single device. The other ranks wait.
    """
    config, comm = trainer.config, trainer.mesh.world
    if not same_on_all_ranks(trainer):
        return Verdict(False, "verify: FAILED: the ranks do not hold the same parameters as one another")
    line = b""  # 0 or 1, and the verdict's line
    parameters = trainer.state_dict()
    if comm.rank == 0:
        single, single_results = train_on_one_device(config, tokens, on_step)
        exact = config.run.reduction == "ordered" and config.mesh.tp == 1 and same_sums(trainer.checkpoint, config)
        runs = (parameters, single, results, single_results)
        verdict = compare(*runs, exact=exact, ranks=comm.size, dtype=config.run.dtype)
        line = f"{int(verdict.passed)}{verdict.line}".encode()
    with comm.engine.patient():
        line = comm.all_gather_bytes(line)[0]
    return Verdict(line[:1] == b"1", line[1:].decode())


def train_on_one_device(
    config: TrainConfig, tokens: Tokens, on_step: OnStep | None = None
) -> tuple[dict[str, np.ndarray], list[StepResult]]:
    """Train the same steps on a mesh of one, nothing sharded; return the parameters and the result of each step."""
    single = OneDevice(config, tokens)
    results = []
    for result in single.train():
        results.append(result)
        if on_step is not None:
            on_step(result)
    return single.state_dict(), results


class OneDevice(Trainer):
    """A trainer that computes all replicas and microbatches one after another on one device, with the same sums.

    It adds the replicas' gradients in rank order, as the `ordered` all-reduce does, to the bit. That needs one more
    array of all gradients (two with `--sync-every-microbatch`).
    """

    def __init__(self, config: TrainConfig, tokens: Tokens) -> None:
        mesh = dataclasses.replace(config.mesh, tp=1, sequence_parallel=False, zero_stage=0, memory_limit=None)
        super().__init__(dataclasses.replace(config, mesh=mesh), DeviceMesh(serial()), tokens)
        self.replicas = range(config.mesh.dp or 1)

    def _forward_backward(self, step: int) -> float:
        microbatches = range(self.config.data.microbatches)
        losses = dict.fromkeys(self.replicas, 0.0)

        def backward(replica: int, microbatches: Iterable[int]) -> None:
            for m in microbatches:
                losses[replica] += self.backward_microbatch(step, replica, m)

        def backward_all_replicas(microbatches: Iterable[int]) -> None:
            self.accumulate(lambda replica: backward(replica, microbatches), self.replicas)

        with self.ddp.no_sync():
            if self.config.mesh.sync_every_microbatch:
                self.accumulate(lambda m: backward_all_replicas([m]), microbatches)
            else:
                backward_all_replicas(microbatches)
        self.ddp.synchronize()
        total = 0.0
        for loss in losses.values():
            total += loss
        return total

    def accumulate(self, backward: Callable[[int], None], indices: Iterable[int]) -> None:
        """Compute g_0 + g_1 + ... in the gradient buffers, added from left to right; backward(i) computes g_i there."""
        assert isinstance(self.ddp, DistributedDataParallel)
        gradients = self.ddp.buffers.gradients
        total: Array | None = None
        for i in indices:
            for parameter in self.ddp.parameters():
                parameter.zero_grad()
            backward(i)
            for bucket in self.ddp.buckets:
                bucket.complete()
            if total is None:
                total = gradients.copy()
                hold("buffers", total)
            else:
                total += gradients
        gradients[...] = total

    def _clip_grad_norm(self, max_norm: float | None) -> float:
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.units, self.mesh.dp, chunks=len(self.replicas))
