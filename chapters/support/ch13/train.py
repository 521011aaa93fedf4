"""Train a small GPT in several precisions, and read its gradients (sections 13.3 to 13.5 and 13.8)."""

from typing import Any
from unittest.mock import patch

import numpy as np

from chapters.support.training import make_trainer, parsed, text_for
from minipar.autograd import backward
from minipar.backend import Array
from minipar.comm import DeviceMesh, serial
from minipar.more.precision import MixedPrecisionAdamW
from minipar.nn import Parameter
from minipar.train.data import Batches
from minipar.train.scaled_trainer import ScaledTrainer
from minipar.train.verify import OneDevice

MODEL = "--layers 2 --hidden 32 --heads 2 --seq-len 32 --vocab-size 256"
RUN = "--global-batch 8 --lr 5e-4 --lr-schedule cosine --steps 200"


class WithoutMasters(MixedPrecisionAdamW):
    """AdamW that starts each update from the rounded weight: nothing but the weight's 2 bytes remembers it."""

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        master = self.masters[i]
        if master is not None:
            master[...] = parameter.data
        super().update(i, parameter, gradient)


class OverflowingTrainer(ScaledTrainer):
    """A trainer in which the last rank's own gradient overflows in the second step, before it is summed."""

    def run_schedule(self, step: int, replica: int) -> list[float]:
        factor, world = self.loss_factor, self.mesh.world
        if step == 1 and world.rank == world.size - 1:
            self.loss_factor = np.inf
        with np.errstate(invalid="ignore"):
            losses = super().run_schedule(step, replica)
        self.loss_factor = factor
        return losses


class SumsInBfloat16(OneDevice):
    """One device that adds the replicas' gradients in rank order, and rounds each partial sum to bfloat16."""

    def replica_gradient(self, step: int) -> float:
        total_loss = 0.0
        total = None
        with self.ddp.no_sync():
            for replica in range(self.args.dp):
                self.ddp.zero_grad()
                total_loss += sum(self.run_schedule(step, replica))
                own = np.concatenate([bucket.complete() for bucket in self.ddp.buckets]).astype("bfloat16")
                total = own if total is None else total + own
        sizes = [bucket.size for bucket in self.ddp.buckets]
        for bucket, values in zip(self.ddp.buckets, np.split(total, np.cumsum(sizes)[:-1]), strict=True):
            bucket.complete()[...] = values
        self.ddp.synchronize()
        return total_loss


def train_precision(flags: str, masters: bool = True, ranks: int = 1, run: str = RUN) -> tuple[list[float], float]:
    """Train with these flags. Return the loss of each step, and the share of the norms' weights that are still 1.

    ranks: of data parallelism. If there are several, one device computes them all, and sums in bfloat16.
    """
    if ranks == 1:
        trainer = make_trainer(serial(), f"{MODEL} {run} {flags}")
    else:
        args = parsed(f"{MODEL} {run} {flags}", ranks)
        trainer = SumsInBfloat16(args, DeviceMesh(serial()), text_for(args))
    if not masters:
        trainer.optimizer.__class__ = WithoutMasters
    losses = [result.loss for result in trainer.train()]
    norms = [
        p.data.astype("float32") for name, p in trainer.model.named_parameters() if "ln_" in name and "weight" in name
    ]
    return losses, float((np.concatenate(norms) == 1).mean())


def first_gradient(dtype: str, loss_scale: float = 1.0, samples: int = 16) -> np.ndarray:
    """Return the gradient of all parameters in the first step, (Psi,) in float32, with the scale taken out again."""
    trainer = make_trainer(serial(), f"{MODEL} --dtype {dtype} --global-batch {samples} --steps 1")
    trainer.loss_factor *= loss_scale
    with np.errstate(over="ignore", invalid="ignore"):
        trainer.gradient(0)
        return np.concatenate([p.grad.astype("float32").reshape(-1) for p in trainer.ddp.parameters()]) / loss_scale


def activation_gradients() -> np.ndarray:
    """Return log2 of the absolute values, other than 0, of the gradients of all activations in a first step in fp32."""
    seen: list[np.ndarray] = []
    original = backward.input_gradients

    def watch(node: backward.Node, grad: Array) -> Any:
        seen.append(np.abs(grad).reshape(-1))
        return original(node, grad)

    trainer = make_trainer(serial(), f"{MODEL} --global-batch 16 --steps 1")
    with patch.object(backward, "input_gradients", watch):
        trainer.step(0)
    values = np.concatenate(seen[1:])  # but that of the loss, with which backward begins
    return np.log2(values[values > 0])


def sample_gradients(count: int) -> np.ndarray:
    """Return the gradient of one matrix (the first MLP's) for each of `count` samples, (count, 4096) in float32."""
    args = parsed(f"{MODEL} --global-batch {count}")
    model = args.shape.build(seed=args.seed)
    batches = Batches(text_for(args), args.seq_len, count, args.order, args.seed)
    matrix = dict(model.named_parameters())["h.0.mlp.c_fc.weight"]
    rows = []
    for sample in range(count):
        model.zero_grad()
        loss = model.loss_sum(*batches.batch(0, [sample])) / (count * args.seq_len)
        loss.backward()
        rows.append(matrix.grad.reshape(-1).copy())
    return np.array(rows)
