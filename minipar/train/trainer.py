"""The training loop: the same program on one device and on any mesh. `Trainer.step` is one step.

The global batch is cut into one share for each data-parallel replica, and each share into microbatches.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minipar.autograd import Tensor, flop_counter, no_grad
from minipar.backend import from_host, synchronize, xp
from minipar.comm.clock import ModelClock
from minipar.comm.mesh import DeviceMesh
from minipar.comm.trace import unseen
from minipar.errors import UsageError, writing
from minipar.memory import enter
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.moe import moe_layers
from minipar.nn.optim import AdamW, learning_rate
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.memory import STAGES, check_limit, precision_of
from minipar.parallel.parallelize import parallelize
from minipar.parallel.pipeline.actions import Action
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineParallel
from minipar.parallel.placement import placement_of
from minipar.parallel.state import gather_state
from minipar.record import Record
from minipar.train.checkpoint import Checkpoint, restore_optimizer, run_flags, save
from minipar.train.config import TrainConfig, schedule_of
from minipar.train.data import Batches, Evaluation, Tokens
from minipar.train.from_config import make_model, step_layout

DIGITS = {"bfloat16": 3, "float16": 4, "float32": 5, "float64": 10}  # significant ones of the validation loss

DIVERGED = "training has diverged: {}; try a smaller --lr than {:g}, --warmup-steps or --clip-grad"
LOSS_SCALE, GOOD_STEPS = 2.0**16, 2000  # at the start, and from one doubling to the next


@dataclass(frozen=True)
class StepResult:
    """The result of one step, which is one line of `--metrics`."""

    step: int  # counted from 0
    loss: float  # mean over the global batch before the update, nats per token
    grad_norm: float  # before clipping
    seconds: float
    tokens_per_second: float
    dropped: int | None = None  # with --capacity-factor: assignments of all layers for which experts had no room
    skipped: int | None = None  # steps without an update so far, because a gradient was not finite


class Trainer:
    """The training of `config` on a mesh of config.mesh's sizes, from step 0 or from a checkpoint of any layout.

    A step sends what parallel/traffic.py says. UsageError if the model state does not fit `--memory-limit`.
    """

    def __init__(
        self, config: TrainConfig, mesh: DeviceMesh, tokens: Tokens, checkpoint: Checkpoint | None = None
    ) -> None:
        assert config.mesh.dp is not None, "resolve() fills dp in"
        self.config, self.mesh = config, mesh
        data, adamw = config.data, config.optimizer
        self.checkpoint, self.first_step = checkpoint, 0 if checkpoint is None else checkpoint.step
        self.model = make_model(config, checkpoint)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}  # of the serial model
        self.size = sum(p.size for p in self.model.parameters())  # Psi, of the serial model
        self.tokens_per_step = data.global_batch * config.model.seq_len
        self.samples_per_microbatch = data.global_batch // (config.mesh.dp * data.microbatches)
        self.last_microbatch: int | None = data.microbatches - 1  # its backward starts the sum of the gradients
        # fp16's loss scale, which shifts small gradients into its range, and the steps since it last changed.
        self.loss_scale, self.good_steps = LOSS_SCALE if config.run.dtype == "float16" else 1.0, 0
        self.skipped = 0
        self.recording = False
        self.gathering = False  # gradients: every step leaves them in `gradients`, on rank 0
        self.gradients: dict[str, np.ndarray] = {}  # of the last step, before clipping, if they are gathered
        model = config.model
        self.counts_loads = model.router_bias > 0 or model.capacity_factor is not None
        self.loads: np.ndarray = np.zeros(0, np.int64)  # of the last step, if it counts them; see _balance
        self.record: Record | None = None  # on rank 0; see start_record
        self._check_memory()
        self._parallelize()
        self.moes = moe_layers(self.model)
        for moe in self.moes:
            moe.capacity_factor = config.model.capacity_factor
        if config.run.export is not None and (config.model.router_bias or any(moe.bias.any() for moe in self.moes)):
            raise UsageError("--export: a Mixtral's files have no place for the biases of --router-bias; --save has")
        self.optimizer = AdamW(self.ddp.parameters(), betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay)
        if checkpoint is not None:
            restore_optimizer(checkpoint, self.optimizer)
            self.loss_scale, self.good_steps = checkpoint.manifest.get("loss_scale", (self.loss_scale, 0))
            self.skipped = checkpoint.manifest.get("skipped", 0)  # older checkpoints do not count
        self.batches = Batches(
            tokens, seq_len=config.model.seq_len, global_batch=data.global_batch, order=data.order, seed=config.run.seed
        )
        self.batches.part = self.context.part

    def _check_memory(self) -> None:
        """Raise UsageError if the model state of this rank does not fit `--memory-limit`."""
        config, mesh, run = self.config, self.mesh, self.config.run
        if config.mesh.memory_limit is None:
            return
        widths = [precision_of(run.dtype, run.gradients, run.reduce_dtype if stage == 0 else None) for stage in STAGES]
        placements = step_layout(config, self.model.config).placements(tp=mesh.tp.rank, pp=mesh.pp.rank)
        ranks = mesh.dp_cp.size // config.mesh.zero_replicas
        accumulating = config.data.microbatches > 1 and not config.mesh.sync_every_microbatch
        check_limit(config.mesh.memory_limit, placements, ranks, config.mesh.zero_stage, widths, accumulating)

    def _parallelize(self) -> None:
        """Apply the mesh's strategies to the serial model, and make the pipeline's executor."""
        config, mesh, model, run = self.config, self.mesh, self.model, self.config.run
        schedule = schedule_of(config) if mesh.pp.size > 1 else None
        replicas = config.mesh.zero_replicas if config.mesh.zero_stage > 0 else 1  # a single device has no shards
        made = parallelize(
            model,
            mesh,
            zero_stage=config.mesh.zero_stage,
            replicas=replicas,
            reduction=run.reduction,
            sequence=config.mesh.sequence_parallel,
            context_method=config.mesh.context_parallel,
            context_order=config.mesh.cp_order,
            schedule=schedule,
            length=config.model.seq_len,
            parts_as_units=config.mesh.pp > 1,  # a single device that verifies a pipeline has the pipeline's units
            gradient_dtype=run.gradients,
            reduce_dtype=run.reduce_dtype,
        )
        self.ddp, self.context, self.pipeline = made.ddp, made.context, made.pipeline
        if schedule is not None and made.pipeline is not None:
            tokens = config.model.seq_len // mesh.cp.size
            if config.mesh.sequence_parallel:
                tokens //= mesh.tp.size
            shape = (self.samples_per_microbatch, tokens, model.config.n_embd)
            stages = made.pipeline.stages
            self.executor = PipelineExecutor(schedule, mesh.pp, stages, shape, np.dtype(run.dtype))

    def train(self) -> Iterator[StepResult]:
        """Take the configured steps that the checkpoint has not taken, and yield the result of each."""
        for step in range(self.first_step, self.config.optimizer.steps):
            yield self.step(step)

    def step(self, step: int) -> StepResult:
        """Take one optimizer step over the global batch; every rank of the mesh calls it with the same `step`."""
        start = time.perf_counter()
        with self._model_clock():
            loss = self.compute_gradient(step)
            if self.recording or self.gathering:
                before = time.perf_counter()
                with unseen(self.mesh.world):
                    self.gradients = self.state_dict(gradients=True)
                start += time.perf_counter() - before  # a recorded step reports the seconds of a step
            with self._region("optimizer"):
                grad_norm = self._clip_grad_norm(self.config.optimizer.clip_grad or None)
                drops = self.update(step, loss, grad_norm)
                synchronize()
            if self.pipeline is not None:  # outside the region, because the last stage computes nothing here
                self.pipeline.send_tied_weight(self.ddp.gather_parameter)
        seconds = time.perf_counter() - start
        if self.recording:
            with unseen(self.mesh.world):
                parameters = self.state_dict()
            if self.record is not None:
                with writing(f"--record {self.record.directory}", self.record.directory / f"step-{step}.npz"):
                    self.record.step(step, loss, grad_norm, self.gradients, parameters)
        skipped = self.skipped if self.config.run.skip_nonfinite or self.config.run.dtype == "float16" else None
        return StepResult(step, loss, grad_norm, seconds, self.tokens_per_step / seconds, drops, skipped)

    def compute_gradient(self, step: int) -> float:
        """Compute the gradient of the global batch's mean loss, not clipped yet; return that loss. Collective."""
        enter("forward", restart=True)
        self.ddp.zero_grad()
        for moe in self.moes:  # each of t ranks adds a t-th: gradients of the router are summed over tp
            moe.load[:] = moe.dropped = 0
            count = len(self.moes) * self.tokens_per_step * self.mesh.tp.size
            moe.aux_loss = self.loss_scale * self.config.model.aux_loss / count
        loss = self._forward_backward(step)
        for p in self.ddp.parameters() if self.loss_scale != 1 else ():
            p.grad = xp.multiply(p.grad, 1 / self.loss_scale, out=p.grad)
        return loss / self.tokens_per_step

    def update(self, step: int, loss: float, grad_norm: float) -> int | None:
        """Update the parameters, unless the step is skipped, and the routers' biases; return how much experts dropped.

        Sends what the strategy's optimizer step and the balance of experts send.
        """
        o = self.config.optimizer
        self.optimizer.lr = learning_rate(
            step, lr=o.lr, schedule=o.lr_schedule, warmup_steps=o.warmup_steps, total_steps=o.steps
        )
        if self._is_good(step, loss, grad_norm):
            self.optimizer.step()
        return self._balance()

    def _is_good(self, step: int, loss: float, grad_norm: float) -> bool:
        """Return whether the step may update. All ranks answer alike: they have one loss and one norm.

        A step that may not is skipped with `--skip-nonfinite`, and in fp16, which halves the loss scale, down to 1.
        Else UsageError names the first rank and parameter. After GOOD_STEPS good ones fp16 doubles the scale.
        """
        run, finite = self.config.run, math.isfinite(loss) and math.isfinite(grad_norm)
        self.good_steps = self.good_steps + 1 if finite else 0
        if run.dtype == "float16" and (not finite or self.good_steps == GOOD_STEPS):
            self.loss_scale, self.good_steps = self.loss_scale * (2 if finite else 0.5), 0
        self.skipped += not finite
        may_skip = self.loss_scale >= 1 if run.dtype == "float16" else run.skip_nonfinite
        if not finite and not may_skip:
            wrong = (placement_of(p).name for p in self.ddp.parameters() if not xp.isfinite(p.grad).all())
            names = self.mesh.world.all_gather_bytes(next(wrong, "").encode())
            first = next((f": rank {rank}, {name.decode()}" for rank, name in enumerate(names) if name), "")
            problem = f"loss {loss:g} and gradient norm {grad_norm:g} in step {step + 1}{first}"
            raise UsageError(DIVERGED.format(problem, self.config.optimizer.lr))
        return finite

    def _forward_backward(self, step: int) -> float:
        """Compute the gradient of the global batch's mean loss; return the global batch's summed loss."""
        replica, microbatches = self.mesh.dp.rank, range(self.config.data.microbatches)
        if self.pipeline is not None:
            loss = self._run_schedule(step, self.pipeline, [self.samples(replica, m) for m in microbatches])
        else:
            loss = 0.0
            for m in microbatches:
                sync = m == self.last_microbatch or self.config.mesh.sync_every_microbatch
                with nullcontext() if sync else self.ddp.no_sync():
                    loss += self.backward_microbatch(step, replica, m)
                if sync:
                    self.ddp.synchronize()
        return float(self.mesh.dp_cp.all_reduce(np.array([loss]), algorithm="ordered")[0])

    def _run_schedule(self, step: int, pipeline: PipelineParallel, samples: Sequence[range]) -> float:
        """Run forward and backward of each microbatch m, samples[m], of this replica; return the summed loss."""
        losses = np.zeros(1)
        # All batches are read before the first action; between two actions, the other ranks would wait for it.
        is_end = pipeline.comm.rank in (pipeline.first, pipeline.last)
        batches = [tuple(map(from_host, self.batches.batch(step, each))) for each in samples] if is_end else []

        def loss(m: int, logits: Tensor) -> Tensor:
            value = pipeline.model.criterion(logits, batches[m][1])
            losses[0] += value.item()
            return value

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            enter("forward" if action.kind == "F" else "backward")
            keys = dropping(DropoutKeys(self.config.run.seed, step, samples[action.microbatch]))
            sync = nullcontext() if action.microbatch == self.last_microbatch else self.ddp.no_sync()
            with keys, sync, self.ddp.scaled_backward(), pipeline.comm.tracer.region(str(action)):
                yield

        self.executor.run(lambda m: batches[m][0], loss, self.loss_scale / self.tokens_per_step, around)
        pipeline.fetch_tied_gradient()
        self.ddp.synchronize()
        pipeline.comm.all_reduce(losses, algorithm="ordered")  # zero on all stages but the last
        return float(losses[0])

    def backward_microbatch(self, step: int, replica: int, microbatch: int) -> float:
        """Add one microbatch's gradient, scaled by 1 / tokens of the global batch, and return its summed loss."""
        samples = self.samples(replica, microbatch)
        inputs, targets = self.batches.batch(step, samples)
        keys = DropoutKeys(self.config.run.seed, step, samples)
        with self._region("forward"), dropping(keys):
            loss = self.model.loss_sum(from_host(inputs), from_host(targets))
        with self._region("backward"), self.ddp.scaled_backward():
            loss.backward(xp.full_like(loss.data, self.loss_scale / self.tokens_per_step))
        return loss.item()

    def validation_loss(self, evaluation: Evaluation) -> float:
        """Return the mean loss in nats per token of the evaluation's samples, the same in every layout. Collective.

        Each sample is a batch of its own, so its loss has the same bits on whichever rank it is computed, and losses
        are added in the order of the samples. Only tensor parallelism adds in another order, within its products of
        matrices. The loss is therefore rounded to DIGITS; two losses beside a rounding boundary can still differ, by
        one in the last digit. Sends what forward sends with B = 1, for each sample, and the losses (8 bytes per sample)
        over dp and pp.
        """
        dp, count, length = self.mesh.dp, len(evaluation.starts), self.config.model.seq_len
        losses = np.zeros(-(-count // dp.size) * dp.size)
        with no_grad():  # outside of `dropping`, so dropout is off
            for sample in range(dp.rank, len(losses), dp.size):  # the same number on every rank: ZeRO 3 gathers
                window = evaluation.tokens.read(evaluation.starts[min(sample, count - 1)] + np.arange(length + 1))
                losses[sample] = self._sample_loss(*(self.context.part(ids[None]) for ids in (window[:-1], window[1:])))
        for comm in (self.mesh.dp_cp, self.mesh.pp):
            comm.all_reduce(losses, algorithm="ordered")
        total = np.cumsum(losses[:count])[-1]  # adds from left to right; sum would add in pairs
        return float(f"{total / (count * length):.{DIGITS[self.config.run.dtype]}g}")

    def _sample_loss(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Return the summed loss of one sample, (1, T) inputs and targets; 0 on a rank without the last stage."""
        if self.pipeline is None:
            return self.model.loss_sum(from_host(inputs), from_host(targets)).item()
        comm, executor, home = self.pipeline.comm, self.executor, self.executor.schedule.home
        shape, last = (1, *executor.shape[1:]), len(home) - 1
        x: Any = from_host(inputs)
        for number, stage in sorted(self.pipeline.stages.items()):
            if number > 0 and home[number - 1] != comm.rank:
                x = Tensor(comm.irecv(xp.empty(shape, dtype=executor.dtype), home[number - 1], number).wait())
            for part in stage.parts:
                x = part.run(x)
            if number < last and home[number + 1] != comm.rank:
                comm.isend(xp.ascontiguousarray(x.data), home[number + 1], number + 1).wait()
        return self.model.criterion(x, from_host(targets)).item() if home[last] == comm.rank else 0.0

    def samples(self, replica: int, microbatch: int) -> range:
        """Return the positions, in the global batch, of a replica's samples in one microbatch."""
        first = (replica * self.config.data.microbatches + microbatch) * self.samples_per_microbatch
        return range(first, first + self.samples_per_microbatch)

    def state_dict(self, gradients: bool = False) -> dict[str, np.ndarray]:
        """Collect the serial model's parameters (or gradients) by name, as host arrays, on rank 0; {} elsewhere."""
        values = [p.grad for p in self.optimizer.parameters] if gradients else self.optimizer.values()
        state = gather_state(self.model, self.optimizer.parameters, self.mesh.world, values)
        return {name: state[name] for name in self.shapes if name in state}  # rank 0 lists its own experts first

    def start_record(self, directory: str) -> None:
        """Record every further step for `minipar.compare`: rank 0 gets all gradients and parameters. Collective."""
        config, parameters, self.recording = self.config, self.state_dict(), True
        if self.mesh.world.rank == 0:
            facts: dict[str, Any] = {axis: getattr(config.mesh, axis) for axis in ("dp", "cp", "ep", "tp", "pp")}
            facts |= {"microbatches": config.data.microbatches, "tokens": self.tokens_per_step}
            with writing(f"--record {directory}"):
                self.record = Record(directory, parameters, dtype=config.run.dtype, **facts)

    def save(self, directory: str | Path, step: int) -> None:
        """Write a checkpoint after `step` optimizer steps. Collective; see `minipar.train.checkpoint.save`."""
        history = [] if self.checkpoint is None else self.checkpoint.history
        header = {
            "dtype": self.config.run.dtype,
            "data": self.batches.tokens.fingerprint().hex(),
            "model": asdict(self.model.config),
            "parameters": self.shapes,
            "router_bias": [moe.bias.tolist() for moe in self.moes],
            "loss_scale": [self.loss_scale, self.good_steps],
            "skipped": self.skipped,
            "history": [*history, {"step": self.first_step, "flags": run_flags(self.config)}],
        }
        save(self.mesh.world, directory, step, self.optimizer, header)

    def _balance(self) -> int | None:
        """Move each router's biases towards the mean load of the global batch; return how much experts dropped."""
        rate, factor = self.config.model.router_bias, self.config.model.capacity_factor
        if not self.counts_loads:
            return None
        counts = np.array([[*moe.load, moe.dropped] for moe in self.moes])  # (L, E + 1)
        for comm in (self.mesh.dp_cp, self.mesh.pp):  # ranks with other tokens, and with other layers
            comm.all_reduce(counts, algorithm="ordered")
        self.loads = counts
        for moe, load in zip(self.moes, counts[:, :-1], strict=True):  # arXiv 2408.15664, algorithm 1
            moe.bias += rate * np.sign(load.sum() - load.size * load)
        return None if factor is None else int(counts[:, -1].sum())

    def _clip_grad_norm(self, max_norm: float | None) -> float:
        mesh = self.mesh
        return clip_grad_norm(self.ddp.parameters(), max_norm, self.ddp.shard_comm, mesh.tp, mesh.pp)

    def _model_clock(self) -> AbstractContextManager[None]:
        """Advance a model clock by each matrix product's operations / its speed. All else takes no time on it."""
        clock = self.mesh.world.clock
        if not isinstance(clock, ModelClock):
            return nullcontext()
        return flop_counter(lambda flops: clock.advance(flops / clock.flops_per_second))

    def _region(self, name: str) -> AbstractContextManager[None]:
        """Name a phase of the step, for the trace and for the memory ledger."""
        enter(name)
        return self.mesh.world.tracer.region(name)
