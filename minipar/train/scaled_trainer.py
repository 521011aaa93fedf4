"""The trainer of `--dtype float16`: it multiplies the loss by a scale, and skips a step whose gradient overflows."""

import math
from argparse import Namespace

from minipar.comm.mesh import DeviceMesh
from minipar.more.precision import LossScale
from minipar.train.data import Tokens
from minipar.train.trainer import StepResult, Trainer


class ScaledTrainer(Trainer):
    """A trainer with a loss scale, which shifts small gradients into the range of fp16."""

    def __init__(self, args: Namespace, mesh: DeviceMesh, tokens: Tokens) -> None:
        super().__init__(args, mesh, tokens)
        self.scale = LossScale()
        self.extra = self.scale.values

    def gradient(self, step: int) -> float:
        self.loss_factor = self.scale.factor / self.tokens_per_step
        loss = super().gradient(step)
        self.scale.divide(self.ddp.parameters())
        return loss

    def update(self, step: int, loss: float) -> StepResult:
        result = super().update(step, loss)
        self.scale.update(math.isfinite(loss) and math.isfinite(result.grad_norm))
        return result

    def handle_not_finite(self, step: int, loss: float, norm: float) -> None:
        """Skip the step; UsageError if the scale cannot become smaller."""
        if self.scale.factor <= 1:
            super().handle_not_finite(step, loss, norm)
