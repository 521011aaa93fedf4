"""The training loop: the same program on one device and on any mesh. `Trainer.step` is one step."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar import memory
from minipar.autograd import Tensor, flop_counter, no_grad
from minipar.backend import Array, xp
from minipar.comm.clock import ModelClock
from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError
from minipar.more.context.blockwise import use_blockwise
from minipar.more.experts.mixtral import scale_auxiliary_loss
from minipar.more.precision import MixedPrecisionAdamW, enable_two_bytes
from minipar.nn.gpt import LanguageModel
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.optim import learning_rate
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.pipeline.stage import Around, PipelineExecutor
from minipar.parallel.placement import placement_of
from minipar.parallel.state import gather_state
from minipar.train.data import Batches, Tokens
from minipar.train.parallelize import parallelize
from minipar.train.pretrained import load_pretrained


@dataclass(frozen=True)
class StepResult:
    """The result of one step, counted from 0."""

    step: int
    loss: float  # mean over the global batch before the update, nats per token
    grad_norm: float  # before clipping


def make_model(args: Namespace) -> LanguageModel:
    """Make the serial model: of the flags' shape, or what `--init-from` holds."""
    if np.dtype(args.dtype).itemsize == 2:
        enable_two_bytes()
    options: dict[str, Any] = {"dtype": args.dtype, "recompute": args.recompute == "full"}
    if args.dropout:
        options["dropout"] = args.dropout
    if args.init_from is not None:
        return use_blockwise(load_pretrained(args.init_from, **options))
    return use_blockwise(args.shape.build(seed=args.seed, **options))


class Trainer:
    """One training of the flags `args`. The mesh has the sizes that they say.

    Under `--verify` one device's mesh trains again, and the flags may still say dp and pp (verify.py).

    The global batch is cut into a share for each replica (rank of dp), and a share into microbatches.
    """

    loss_order = "ordered"  # the order of the sum over replicas: the same bits in each run
    clip: Callable[..., float] = staticmethod(clip_grad_norm)

    def __init__(self, args: Namespace, mesh: DeviceMesh, tokens: Tokens) -> None:
        self.args = args
        self.mesh = mesh
        self.model = make_model(args)
        # Of the serial model, whose parameters checkpoints name; `parallelize` cuts them.
        self.sizes = {name: p.size for name, p in self.model.named_parameters()}
        strategies = parallelize(self.model, mesh, args)
        self.ddp, self.context, self.tensor, self.pipeline, self.executor = strategies
        self.evaluator = self.executor.evaluator()
        # `update_parameters` sets the learning rate of each step.
        self.optimizer = MixedPrecisionAdamW(
            self.ddp.parameters(), betas=args.betas, weight_decay=args.weight_decay
        )
        self.batches = Batches(tokens, args.seq_len, args.global_batch, args.order, args.seed)
        self.microbatch_size = args.global_batch // (args.dp * args.microbatches)
        self.tokens_per_step = args.global_batch * args.seq_len
        # The model's criterion is a sum over tokens. Backward begins with this factor in place of 1, so that
        # microbatches and ranks add up to the gradient of the mean.
        self.loss_factor = 1 / self.tokens_per_step
        self.first_step = 0  # a checkpoint changes it
        self.extra: dict[str, float] = {}  # what a subclass adds to a checkpoint, such as the loss scale

    def train(self) -> Iterator[StepResult]:
        """Take the steps that are left, and yield the result of each."""
        for step in range(self.first_step, self.args.steps):
            yield self.step(step)

    def step(self, step: int) -> StepResult:
        """Take one optimizer step over the global batch. Every rank calls it with the same `step`."""
        clock = self.mesh.world.clock
        # A model clock simulates time: of what is computed, matrix products alone take some.
        with flop_counter(clock.compute) if isinstance(clock, ModelClock) else nullcontext():
            return self.update(step, self.gradient(step))

    def gradient(self, step: int) -> float:
        """Compute the gradient of the global batch's mean loss plus auxiliary losses; return the mean loss.

        `update` clips it. To see gradients before, call the two in turn, as `--record` does.
        """
        memory.enter("forward", restart=True)
        self.ddp.zero_grad()
        # The auxiliary loss of experts is a sum over samples, as the criterion is, so it has the same factor. Every
        # rank of tp computes all of it, and `tensor.sum_partial` adds their router gradients, so each takes 1/tp.
        scale_auxiliary_loss(self.model, self.loss_factor / self.mesh.tp.size, self.mesh.cp)
        loss = np.array([self.replica_gradient(step)])
        if self.pipeline is not None:
            self.mesh.pp.all_reduce(loss, algorithm="ordered")  # zero on all stages but the last
        self.mesh.dp_cp.all_reduce(loss, algorithm=self.loss_order)
        return float(loss[0]) / self.tokens_per_step

    def update(self, step: int, loss: float) -> StepResult:
        """Clip the gradient and take the optimizer's step, if loss and gradient are finite."""
        memory.enter("optimizer")
        with self.mesh.world.tracer.region("optimizer"):
            norm = self.clip_grad_norm(self.args.clip_grad or None)
            if math.isfinite(loss) and math.isfinite(norm):
                self.update_parameters(step)
            else:
                self.handle_not_finite(step, loss, norm)
        return StepResult(step, loss, norm)

    def update_parameters(self, step: int) -> None:
        """Take the optimizer's step, with the learning rate of this step."""
        args = self.args
        self.optimizer.lr = learning_rate(step, args.lr, args.lr_schedule, args.warmup_steps, args.steps)
        self.optimizer.step()
        self.send_tied_weight()

    # ---- the gradient of a replica -----------------------------------------------------------------------------------

    def replica_gradient(self, step: int) -> float:
        """Compute the gradients of this replica's microbatches and sum them over the replicas.

        Return the sum of this rank's losses: 0 before the last stage of a pipeline, and on a rank of cp the loss of its
        part of the tokens.
        """
        losses = self.run_schedule(step, self.mesh.dp.rank)
        if self.pipeline is not None:
            self.pipeline.fetch_tied_gradient()  # the head's, from the last stage to the first
        self.ddp.synchronize()
        return sum(losses)

    def run_schedule(self, step: int, replica: int) -> list[float]:
        """Run forward and backward of all microbatches in the schedule's order.

        Return the loss of each, summed over its tokens. Without a pipeline the schedule is that of one stage: one
        microbatch after the other.
        """
        args = self.args
        # They are read before the first action: between two actions, the other ranks would wait.
        batches = []
        for m in range(args.microbatches):
            batches.append(self.own_tokens(*self.batches.batch(step, self.samples(replica, m))))

        @contextmanager
        def around(action: Any) -> Iterator[None]:
            m = action.microbatch
            # The kind is F, B, or one of B's halves, I (of the input) and W (of the weights).
            phase = "forward" if action.kind == "F" else "backward"
            memory.enter(phase)
            region = self.mesh.world.tracer.region(phase if self.pipeline is None else str(action))
            # Backward needs the keys too: recomputation draws forward's dropout masks again.
            masks = dropping(DropoutKeys(args.seed, step, self.samples(replica, m)))
            # Each stage runs the last microbatch's backward last. Only that one sums gradients over the replicas,
            # unless every one does; before, they add up on each rank, as in DDP's `no_sync`.
            sends = args.sync_every_microbatch or m == args.microbatches - 1
            summing = nullcontext() if sends else self.ddp.no_sync()
            # A wrapper refuses the backward of a loss that its own `ddp.loss` has not divided by the count of targets.
            # Here the executor multiplies by `loss_factor`, and `scaled_backward` allows that.
            with summing, masks, self.ddp.scaled_backward(), region:
                yield
            self.after_action(action)

        return self.run_executor(self.executor, batches, around)

    def own_tokens(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Array, Array]:
        """Return the tokens of this rank of cp, and their targets, (B, T) -> (B, T/c) each.

        They stay on the host, where the model checks them without a wait for the device.
        """
        return self.context.part(inputs), self.context.part(targets)

    def run_executor(
        self, executor: PipelineExecutor, batches: list[tuple[Array, Array]], around: Around
    ) -> list[float]:
        """Run an executor's schedule over microbatches, pairs of inputs and targets.

        Return the loss of each, summed over its tokens; 0 before the last stage.
        """

        def tokens(m: int) -> Array:
            return batches[m][0]

        def loss(m: int, logits: Tensor) -> Tensor:
            return self.model.criterion(logits, batches[m][1])

        return executor.run(tokens, loss, self.loss_factor, around)

    def after_action(self, action: Any) -> None:
        """Wait for the sums of a microbatch's gradients, with `--sync-every-microbatch`."""
        is_last = action.microbatch == self.args.microbatches - 1
        if self.args.sync_every_microbatch and action.kind == "B" and not is_last:
            self.ddp.synchronize()

    def samples(self, replica: int, microbatch: int) -> range:
        """Return the positions, in the global batch, of a replica's samples in one microbatch."""
        first = (replica * self.args.microbatches + microbatch) * self.microbatch_size
        return range(first, first + self.microbatch_size)

    # ---- what a step changes -----------------------------------------------------------------------------------------

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Return the norm of the whole gradient, and scale a gradient of a larger norm down to `max_norm`."""
        mesh = self.mesh
        return self.clip(self.ddp.parameters(), max_norm, self.ddp.comm, mesh.tp, mesh.pp)

    def handle_not_finite(self, step: int, loss: float, norm: float) -> None:
        """Raise UsageError on every rank; it names the first rank and parameter whose gradient is not finite."""
        world = self.mesh.world
        bad = [placement_of(p).name for p in self.ddp.parameters() if not xp.isfinite(p.grad).all()]
        places = world.all_gather_bytes(f"rank {world.rank}, {bad[0]}".encode() if bad else b"")
        where = next(filter(None, places), b"the loss alone").decode()
        values = f"loss {loss:g}, gradient norm {norm:g}, --lr {self.args.lr:g}"
        raise UsageError(f"training has diverged in step {step + 1} ({where}): {values}")

    def send_tied_weight(self) -> None:
        """Send the token embedding to the pipeline's last stage, whose head it is too."""
        if self.pipeline is not None:
            # Under ZeRO stage 3 `gather_parameter` collects the whole weight.
            self.pipeline.send_tied_weight(self.ddp.gather_parameter)

    def state_dict(self, gradients: bool = False) -> dict[str, np.ndarray]:
        """Collect the serial model's parameters (or gradients) by name, as host arrays, on rank 0; {} elsewhere."""
        values = [p.grad for p in self.optimizer.parameters] if gradients else self.optimizer.values()
        state = gather_state(self.model, self.optimizer.parameters, self.mesh.world, values)
        # In the serial model's order: rank 0 lists its own experts first.
        return {name: state[name] for name in self.sizes if name in state}

    def take_state(self, run: Mapping[str, Any]) -> None:
        """Continue after a checkpoint: `run` is its run.json, and the optimizer's arrays have been read."""
        self.first_step = run["step"]
        self.optimizer.steps = run["optimizer_steps"]
        self.extra.update(run["extra"])
        self.optimizer.round_masters()  # the file has float32 masters of 2-byte parameters
        self.ddp.after_step()  # ZeRO gathers the parameters, as after an update
        self.send_tied_weight()

    # ---- the validation loss -----------------------------------------------------------------------------------------

    def validation_loss(self, held_out: np.ndarray) -> float:
        """Return the mean loss of held-out samples, (n, T + 1). All ranks call it.

        Each sample is a batch of its own, and losses are added in the samples' order. So every layout gets the same
        loss, but for the rounding of tp and cp within a sample. Sends what forward sends for each sample, and the
        losses, 8 bytes each.
        """
        dp = self.mesh.dp
        count = len(held_out)
        losses = np.zeros(-(-count // dp.size) * dp.size)
        with no_grad():
            # Every rank computes the same number of samples, because ZeRO stage 3 gathers parameters in each.
            for i in range(dp.rank, len(losses), dp.size):
                sample = held_out[min(i, count - 1)][None]  # (1, T + 1)
                batch = self.own_tokens(sample[:, :-1], sample[:, 1:])
                losses[i] = sum(self.run_executor(self.evaluator, [batch], nullcontext))
        self.mesh.dp_cp.all_reduce(losses, algorithm="ordered")
        self.mesh.pp.all_reduce(losses, algorithm="ordered")
        return sum(losses[:count]) / (count * self.args.seq_len)
