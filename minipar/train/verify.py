"""The proof of `--verify`: one device trains the same steps, and every loss, norm and parameter is compared.

In float64, rounding and a mistake are many digits apart, so one bound decides. Where the ranks promise the bits of one
device (`is_exact` in flags.py), bits are compared, in any dtype. Gradient norms are compared because AdamW hides a
gradient of the wrong scale.
"""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minipar.backend import Array, from_host
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import serial
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.train import checkpoint
from minipar.train.data import Tokens
from minipar.train.flags import is_exact
from minipar.train.scaled_trainer import ScaledTrainer
from minipar.train.trainer import StepResult, Trainer
from minipar.train.tree_trainer import TreeTrainer

BOUND = 1e-9  # relative, in float64


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, and the line to print."""

    passed: bool
    line: str


class OneDevice(Trainer):
    """A trainer that computes the replicas one after another, and adds their gradients in rank order."""

    def replica_gradient(self, step: int) -> float:
        """Add the gradients of all replicas as the `ordered` all-reduce does; return their summed loss."""
        buckets = self.ddp.buckets
        totals: list[Array] = [0] * len(buckets)
        total_loss = 0.0
        with self.ddp.no_sync():
            for replica in range(self.args.dp):
                self.ddp.zero_grad()
                total_loss += sum(self.run_schedule(step, replica))
                totals = [
                    total + bucket.complete() for total, bucket in zip(totals, buckets, strict=True)
                ]
        for total, bucket in zip(totals, buckets, strict=True):
            bucket.complete()[...] = total
        self.ddp.synchronize()
        return total_loss

    def clip_grad_norm(self, max_norm: float | None) -> float:
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.mesh.dp, chunks=self.args.dp)


class ScaledOneDevice(ScaledTrainer, OneDevice):
    """One device with a loss scale."""


def one_device(args: Namespace, tokens: Tokens) -> Trainer:
    """Return a trainer that computes on this rank alone what the ranks of `args` compute, with the same sums."""
    alone = copy.copy(args)  # dp and pp stay: it computes replicas in turn, with a pipeline's units
    alone.tp = alone.cp = alone.ep = alone.zero_replicas = 1
    alone.zero_stage = 0
    alone.sequence_parallel = alone.sync_every_microbatch = False
    kind: type[Trainer] = ScaledOneDevice if args.dtype == "float16" else OneDevice
    if args.reduction == "tree":  # its leaves are the microbatches of all replicas
        kind = TreeTrainer
        alone.dp = alone.pp = 1
        alone.microbatches = args.dp * args.microbatches
    return kind(alone, DeviceMesh(serial()), tokens)


def verify(trainer: Trainer, results: Sequence[StepResult]) -> Verdict:
    """Train the steps of `results` on one device, on rank 0, and compare. All ranks call it, and get the verdict."""
    comm = trainer.mesh.world
    state = trainer.state_dict()
    line = ""
    if comm.rank == 0:
        single = one_device(trainer.args, trainer.batches.tokens)
        if trainer.args.resume is not None:
            read_whole(single, trainer.args.resume)  # a step's own directory: newer ones do not matter
        expected = values_of(list(single.train()), single.state_dict())
        line = compare(values_of(results, state), expected, comm.size, is_exact(trainer.args))
    line = comm.all_gather_bytes(line.encode())[0].decode()
    return Verdict("FAILED" not in line, line)


def read_whole(single: Trainer, directory: str) -> None:
    """Read a checkpoint's whole arrays on one device. `checkpoint.resume`, which cuts them, is what is checked."""
    folder = checkpoint.newest(directory)
    for kind, values in checkpoint.states_of(single).items():
        for name, own in values.items():
            own[...] = from_host(np.load(folder / kind / f"{name}.npy"))
    single.take_state(checkpoint.read_run(directory))


def values_of(results: Sequence[StepResult], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all that is compared, by name: losses, norms, and the parameters after the last step."""
    values = {}
    for result in results:
        values[f"the loss of step {result.step + 1}"] = np.array(result.loss)
        values[f"the gradient norm of step {result.step + 1}"] = np.array(result.grad_norm)
    return values | state


def compare(ranks: dict[str, np.ndarray], single: dict[str, np.ndarray], size: int, exact: bool) -> str:
    """Return the line of the verdict, with the worst difference and where it is."""
    run = f"{size} rank{'s' if size > 1 else ''}"
    worst, where = 0.0, ""
    for name, theirs in single.items():
        ours = ranks[name]
        # A step that fp16 skips may have an infinite norm on both sides. NaN is never accepted.
        if ours.tobytes() == theirs.tobytes() and not np.isnan(ours).any():
            continue
        largest = float(np.abs(theirs).max()) or 1.0
        difference = np.abs(ours.astype(np.float64) - theirs)
        found = float(difference.max()) / largest
        if exact or not found <= BOUND:  # NaN is within no bound
            rule = "bits are promised" if exact else f"the bound is {BOUND:g}"
            return f"verify: FAILED: {run} differ from 1 device by {found:.1e} in {name}; {rule}"
        if found >= worst:
            worst, where = found, name
    how = "bit for bit"
    if where:
        how = f"within {worst:.1e} (most in {where}; the bound is {BOUND:g})"
    compared = f"losses, gradient norms and parameters, {len(single)} values and arrays"
    return f"verify: {run} = 1 device {how}: {compared}"
