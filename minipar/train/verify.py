"""The check of `--verify`: after each step, one device computes that step from the same state, and both are compared.

One device on rank 0 starts with the state of the ranks: parameters, AdamW's means, loss scale,
biases of routers. Of each step it computes loss and gradients; rounding.py says how far the ranks'
may differ. Then it takes the gradients of the ranks. Their norm and the update that AdamW makes of
them are computed again. AdamW changes each element by that element's history alone, so the new
state must have the same bits in every layout and dtype. Therefore the next step starts from one and
the same state again, no difference is ever amplified, and no mistake is forgiven because a former
one was.

Where bits are promised (`--reduction ordered` without tp, cp and ep), gradients have the same bits
too, and the run is the uninterrupted training of one device, resumed or not.
"""

import hashlib
import json
import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from minipar.backend import Array, from_host, to_host
from minipar.comm.communicator import Communicator
from minipar.comm.trace import unseen
from minipar.nn import optim
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import holders, placement_of
from minipar.parallel.state import gather_state
from minipar.parallel.tensor.plan import kv_copies
from minipar.train.one_device import OneDevice
from minipar.train.resume import repeatable
from minipar.train.rounding import GradientCheck, described, quantities, same_bits
from minipar.train.settings import TrainConfig
from minipar.train.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, and the line to print."""

    passed: bool
    line: str


def is_exact(config: TrainConfig) -> bool:
    """Return whether a step of this layout has one device's bits."""
    mesh = config.mesh
    if config.run.reduction == "tree":
        return True
    return config.run.reduction == "ordered" and mesh.cp == mesh.ep == mesh.tp == 1


def verify(trainer: Trainer) -> Verdict:
    """Train the steps that are left, check each of them, and return the verdict, the same on every rank.

    All ranks call it.
    """
    verifier = Verifier(trainer)
    for result in trainer.train():
        verifier.check_step(result)
    return verifier.verdict()


class Verifier:
    """The check of one training; make it before the first step. All ranks call each method.

    Rank 0 is sent the state and the gradients after each step, and computes alone while the other
    ranks wait. Neither a trace, nor the accounts of bytes and memory, nor the seconds of a step
    contain any of this.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.comm = trainer.mesh.world
        self.steps = 0
        self.failure = ""
        config = trainer.config
        tokens = trainer.batches.tokens
        checkpoint = trainer.checkpoint
        exact = is_exact(config)
        self.from_start = checkpoint is None or (exact and repeatable(checkpoint, config))
        self.ranks_gradients: dict[str, np.ndarray] = {}  # the last step's, on rank 0
        trainer.gradient_callbacks.append(self._collect_gradients)
        with unseen(self.comm):
            state = whole_state(trainer)
            problem = ""
            self.twin: Float32Twin | None = None
            if np.dtype(config.run.dtype).itemsize == 2 and not exact:
                self.twin = Float32Twin(trainer, state)
            if self.comm.rank == 0:
                self.device = OneDevice(config, tokens, None if self.from_start else checkpoint)
                for step in range(trainer.first_step if self.from_start else 0):
                    self.device.step(step)
                sharper = None if self.twin is None else self.twin.gradients.device
                loads = self.device.balance.counts_loads
                self.gradients = GradientCheck(self.device, exact=exact, loads=loads, sharper=sharper)
                problem = self._different_state(state)
            self._share(problem, trainer.first_step - 1)

    def check_step(self, result: StepResult) -> bool:
        """Compare the step that the trainer has just taken; return False if it is the first that differs.

        After that one, nothing is compared any more.
        """
        if self.failure:
            return True
        with unseen(self.comm):
            state = whole_state(self.trainer)
            problem = ""
            if self.twin is not None:
                problem = self.twin.problem(result.step)
            if self.comm.rank == 0 and not problem:
                problem = self._different_step(result, state)
            if self.twin is not None:
                self.twin.take_parameters(self.trainer, state)
            self._share(problem, result.step)
        self.steps += 1
        return not self.failure

    def verdict(self) -> Verdict:
        """Return the verdict over all steps so far."""
        with unseen(self.comm):
            same = same_on_all_ranks(self.trainer)
            state = whole_state(self.trainer)
        if not self.failure and not same:
            self.failure = "the ranks do not hold the same parameters or state as one another"
        if not self.failure and self.comm.rank == 0:
            self.failure = self._different_end(state)
        verdict = Verdict(False, f"verify: FAILED: {self.failure}")
        if not self.failure and self.comm.rank == 0:
            verdict = Verdict(True, self._proof())
        text = json.dumps(astuple(verdict)).encode()
        return Verdict(*json.loads(self.comm.all_gather_bytes(text)[0]))

    def _collect_gradients(self) -> None:
        """Collect the ranks' gradients of a step, before they are clipped, on rank 0."""
        self.ranks_gradients = self.trainer.state_dict(gradients=True)

    def _share(self, problem: str, step: int) -> None:
        """Let every rank know what rank 0 has found, however long that took it."""
        with self.comm.engine.patient():
            problem = self.comm.all_gather_bytes(problem.encode())[0].decode()
        if problem:
            last = self.trainer.config.optimizer.steps
            self.failure = f"after step {step + 1} of {last}: {problem}"

    def _different_step(self, result: StepResult, state: dict[str, np.ndarray]) -> str:
        """Return the first thing in which a step differs from one device's, "" if there is none; on rank 0."""
        due = self.trainer.first_step + self.steps
        if result.step != due:
            return f"this was step {result.step} (counted from 0), but step {due} was due"
        ranks = quantities(result.loss, self.ranks_gradients, self.trainer.balance.loads)
        problem = self.gradients.problem(result.step, ranks)
        if not problem:
            problem = self._different_norm(result)
        if not problem:
            problem = self._different_update(result, state)
        return problem

    def _different_end(self, state: dict[str, np.ndarray]) -> str:
        """Return what is wrong after the last step, "" if nothing is; on rank 0."""
        due = self.trainer.config.optimizer.steps - self.trainer.first_step
        if self.steps != due:
            return f"{self.steps} steps were taken, but {due} were due"
        if self.steps and not self.gradients.compared:
            return f"all {self.steps} steps were skipped, which proves nothing"
        return self._different_state(state)

    def _different_norm(self, result: StepResult) -> str:
        """Give the one device the ranks' gradients, and compare their norm with the one that the ranks have found."""
        for p in self.device.optimizer.parameters:
            gradient: Array = p.grad
            gradient[...] = from_host(self.ranks_gradients[placement_of(p).name])
        norm = self.device._clip_grad_norm(None)
        if not math.isfinite(norm) and not math.isfinite(result.grad_norm):
            return ""
        if norm != result.grad_norm:
            self.gradients.rounded += 1
        # Either sum of n squares rounds n times, by 2^-53 of itself or less each time, and the root
        # halves both errors.
        limit = 0.0 if self.gradients.exact else self.device.size * 2.0**-53
        both_finite = math.isfinite(norm) and math.isfinite(result.grad_norm)
        if both_finite and abs(norm - result.grad_norm) <= limit * norm:
            return ""
        return f"the gradient norm is {result.grad_norm!r} on the ranks, but these gradients have the norm {norm!r}"

    def _different_update(self, result: StepResult, state: dict[str, np.ndarray]) -> str:
        """Update the one device with the ranks' gradients, and compare its state with theirs, bit for bit."""
        device = self.device
        max_norm = self.trainer.config.optimizer.clip_grad or None
        optim.clip_grad_norm(device.optimizer.parameters, max_norm, norm=result.grad_norm)
        if device.balance.counts_loads:
            for moe, counts in zip(device.moes, self.trainer.balance.loads, strict=True):
                moe.load[:] = counts[:-1]
                moe.dropped = counts[-1]
        dropped = device.update(result.step, result.loss, result.grad_norm)
        if result.dropped != dropped:
            return f"experts dropped {result.dropped} assignments on the ranks, {dropped} on one device"
        if result.skipped not in (None, device.scaler.skipped):
            return (
                f"the ranks say that {result.skipped} steps were skipped, one device that {device.scaler.skipped} were"
            )
        return self._different_state(state)

    def _different_state(self, state: dict[str, np.ndarray]) -> str:
        own = whole_state(self.device)
        different = [name for name in own if name not in state or not same_bits(state[name], own[name])]
        return f"{described(different)} not bit for bit that of one device" if different else ""

    def _proof(self) -> str:
        """Return the line of a verdict that is good."""
        size = self.comm.size
        check = self.gradients
        compared = f"loss, norm, gradients and updates of {len(self.trainer.shapes)} parameters"
        compared += f" ({self.trainer.size:,} values) in "
        compared += "1 step" if self.steps == 1 else f"each of {self.steps} steps"
        if self.trainer.first_step:
            start = "as one device that never stopped" if self.from_start else "from the checkpoint's state"
            compared += f", resumed after {self.trainer.first_step}, {start}"
        run = f"{size} rank{'s' if size > 1 else ''} = 1 device"
        if self.device.scaler.skipped:
            compared += f" ({self.device.scaler.skipped} of all so far were skipped)"
        if check.rounded == 0:
            return f"verify: {run}, bit for bit: {compared}"
        found = f"gradients differ by at most {check.found()}"
        if self.twin is not None:
            found += f"; computed in float32, by at most {self.twin.gradients.found()}"
        return f"verify: {run} within rounding: {compared}; {found}; updates equal"


class Float32Twin:
    """The same layout in float32, and one device in float32: for a run in 2 bytes in which no bits are promised.

    Roundings of activations to 2 bytes differ between layouts, by more than a mistake of 0.1 %
    would. So the ranks compute each gradient a second time in float32, from the same parameters,
    and so does the one device.
    """

    def __init__(self, trainer: Trainer, state: dict[str, np.ndarray]) -> None:
        config = trainer.config
        tokens = trainer.batches.tokens
        run = replace(config.run, dtype="float32", gradients=None, reduce_dtype=None, export=None)
        config = replace(config, run=run, mesh=replace(config.mesh, memory_limit=None))
        self.ranks = type(trainer)(config, trainer.mesh, tokens)
        if trainer.mesh.world.rank == 0:
            self.gradients = GradientCheck(OneDevice(config, tokens), exact=False, loads=False)
        self.take_parameters(trainer, state)

    def problem(self, step: int) -> str:
        """Compute a step's gradients, and return on rank 0 how the ranks' differ from one device's.

        All ranks call it.
        """
        loss = self.ranks.compute_gradient(step)
        gradients = self.ranks.state_dict(gradients=True)
        if not gradients:
            return ""
        problem = self.gradients.problem(step, quantities(loss, gradients, np.zeros(0)))
        return f"computed in float32: {problem}" if problem else ""

    def take_parameters(self, trainer: Trainer, state: dict[str, np.ndarray]) -> None:
        """Take the parameters of the run: each rank its own, and one device those of `state`.

        All ranks call it.
        Sends what the strategy sends after an optimizer step.
        """
        ranks = self.ranks
        for p, q in zip(trainer.optimizer.parameters, ranks.optimizer.parameters, strict=True):
            q.data[...] = p.data
        ranks.ddp.after_step()
        if ranks.pipeline is not None:
            ranks.pipeline.send_tied_weight(ranks.ddp.gather_parameter)
        copies = [ranks]
        if state:
            device = self.gradients.device
            for q in device.optimizer.parameters:
                q.data[...] = from_host(state[f"parameter of {placement_of(q).name}"])
            copies.append(device)
        for copy in copies:
            for moe, other in zip(trainer.moes, copy.moes, strict=True):
                other.bias[:] = moe.bias


def whole_state(trainer: Trainer) -> dict[str, np.ndarray]:
    """Collect on rank 0 all that a step changes: arrays by parameter, and the trainer's values; {} elsewhere."""
    optimizer = trainer.optimizer
    comm = trainer.mesh.world
    arrays: dict[str, list[Array]] = {"parameter": [p.data for p in optimizer.parameters]}
    if any(master is not None for master in optimizer.masters):
        arrays["master"] = optimizer.masters
    arrays |= {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    state: dict[str, np.ndarray] = {}
    for kind, values in arrays.items():
        gathered = gather_state(trainer.model, optimizer.parameters, comm, values)
        state |= {f"{kind} of {name}": array for name, array in gathered.items()}
    if comm.rank > 0:
        return {}
    scaler = trainer.scaler
    state["optimizer steps"] = np.array(optimizer.steps)
    state["good steps"] = np.array(scaler.good_steps)
    state["skipped steps"] = np.array(scaler.skipped)
    state["loss scale"] = np.array(float(scaler.scale))
    for number, moe in enumerate(trainer.moes):
        state[f"router bias of layer {number}"] = moe.bias.copy()
    return state


def same_on_all_ranks(trainer: Trainer) -> bool:
    """Return True on every rank if ranks that hold the same arrays hold the same bits.

    Such are parameters and state of the optimizer on the replicas of dp, of each shard on the
    replicas of shards, what every tensor-parallel rank holds whole, copies of heads on the ranks
    that share them, and on all ranks the biases of routers, loss scale and counts.
    """
    optimizer = trainer.optimizer
    scaler = trainer.scaler
    values = optimizer.values()
    state: dict[Parameter, list[Array]] = {}
    for i, p in enumerate(optimizer.parameters):
        state[p] = [p.data, values[i], optimizer.exp_avg[i], optimizer.exp_avg_sq[i]]
    same = []  # every rank makes every comparison, whatever those before have found
    for comm, parameters in trainer.ddp.replicas():
        copies: list[Array] = []
        for p in parameters:
            copies += state.get(p, [p.data])
        same.append(same_over(comm, comm.size, copies))
    tp = trainer.mesh.tp
    for ranks in {tp.size, kv_copies(trainer.model.config.n_kv_head, tp.size)}:
        held: list[Array] = []
        for p, arrays in state.items():
            if holders(placement_of(p).tp) == ranks:
                held += arrays
        same.append(same_over(tp, ranks, held))
    world = trainer.mesh.world
    counts = np.array([optimizer.steps, scaler.scale, scaler.good_steps, scaler.skipped])
    same.append(same_over(world, world.size, [counts, *(moe.bias for moe in trainer.moes)]))
    votes = world.all_gather_bytes(b"yes" if all(same) else b"no")
    return b"no" not in votes


def same_over(comm: Communicator, neighbours: int, arrays: list[Array]) -> bool:
    """Return whether so many neighbouring ranks of `comm`, with this one, have the same bits in these arrays.

    All ranks call it. Sends a SHA-256.
    """
    own = hashlib.sha256(b"".join(to_host(array).tobytes() for array in arrays)).digest()
    digests = comm.all_gather_bytes(own)
    first = comm.rank - comm.rank % neighbours
    return len(set(digests[first : first + neighbours])) == 1
