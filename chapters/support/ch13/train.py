"""Train a small GPT in several precisions, and read its gradients (sections 13.3 to 13.5 and 13.8)."""

from typing import Any
from unittest.mock import patch

import numpy as np

from chapters.support.training import configuration, make_trainer, text_for
from minipar.autograd import precision
from minipar.autograd.tensor import Function
from minipar.backend import Array
from minipar.comm import serial
from minipar.nn import AdamW, Parameter
from minipar.train.one_device import OneDevice
from minipar.train.trainer import Trainer

MODEL = "--layers 2 --hidden 32 --heads 2 --seq-len 32 --vocab-size 256"
RUN = "--global-batch 8 --lr 5e-4 --lr-schedule cosine --steps 200"


class WithoutMasters(AdamW):
    """AdamW that starts each update from the rounded weight: nothing but the weight's 2 bytes remembers it."""

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        if self.masters[i] is not None:
            self.masters[i][...] = parameter.data
        super().update(i, parameter, gradient)


class OverflowingTrainer(Trainer):
    """A trainer in which the last rank's own gradient overflows in the second step, before it is summed."""

    def backward_microbatch(self, step: int, replica: int, microbatch: int) -> float:
        scale, world = self.scaler.scale, self.mesh.world
        self.scaler.scale = np.inf if step == 1 and world.rank == world.size - 1 else scale
        with np.errstate(invalid="ignore"):
            loss = super().backward_microbatch(step, replica, microbatch)
        self.scaler.scale = scale
        return loss


def _trainer(flags: str, ranks: int = 1) -> Trainer:
    if ranks == 1:
        return make_trainer(serial(), f"{MODEL} {flags}")
    config = configuration(f"{MODEL} {flags}", ranks)
    return OneDevice(config, text_for(config))


def train_precision(flags: str, masters: bool = True, ranks: int = 1, run: str = RUN) -> tuple[list[float], float]:
    """Train with these flags. Return the loss of each step, and the share of the norms' weights that are still 1.

    ranks: of data parallelism. One device computes them all, and adds in the order and the precision of their sums.
    """
    trainer = _trainer(f"{run} {flags} --reduction ordered", ranks)
    if not masters:
        trainer.optimizer.__class__ = WithoutMasters
    losses = [result.loss for result in trainer.train()]
    norms = [
        p.data.astype("float32") for name, p in trainer.model.named_parameters() if "ln_" in name and "weight" in name
    ]
    return losses, float((np.concatenate(norms) == 1).mean())


def first_gradient(dtype: str, loss_scale: float = 1.0, samples: int = 16) -> np.ndarray:
    """Return the gradient of all parameters in the first step, (Psi,) in float32, with the scale taken out again."""
    trainer = _trainer(f"--dtype {dtype} --global-batch {samples} --steps 1 --skip-nonfinite")
    trainer.scaler.scale = loss_scale
    with np.errstate(over="ignore", invalid="ignore"):
        trainer.step(0)
    return np.concatenate([p.grad.astype("float32").reshape(-1) for p in trainer.ddp.parameters()])


def activation_gradients() -> np.ndarray:
    """Return log2 of the absolute values, other than 0, of the gradients of all activations in a first step in fp32."""
    seen: list[np.ndarray] = []
    original = precision.backward

    def watch(node: Function, grad: Array) -> Any:
        seen.append(np.abs(grad).reshape(-1))
        return original(node, grad)

    trainer = _trainer("--global-batch 16 --steps 1")
    with patch.object(precision, "backward", watch):
        trainer.step(0)
    values = np.concatenate(seen[1:])  # but that of the loss, with which backward begins
    return np.log2(values[values > 0])


def sample_gradients(count: int) -> np.ndarray:
    """Return the gradient of one matrix (the first MLP's) for each of `count` samples, (count, 4096) in float32."""
    trainer = _trainer(f"--global-batch {count} --microbatches {count}")
    matrix = dict(trainer.model.named_parameters())["h.0.mlp.c_fc.weight"]
    rows = []
    for m in range(count):
        trainer.ddp.zero_grad()
        with trainer.ddp.no_sync():
            trainer.backward_microbatch(0, 0, m)
        rows.append(matrix.grad.reshape(-1).copy())
    return np.array(rows)
