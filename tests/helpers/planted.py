"""Mistakes that `--verify` must see in any layout, dtype and step: trainers that make one each."""

import math

import numpy as np

from minipar.nn.optim import AdamW
from minipar.parallel.placement import placement_of
from minipar.train.trainer import Trainer

# The parameter in which a mistake is made, by model: split by tp, in the middle of the model.
WHERE = {
    "gpt2": "h.1.mlp.c_fc.weight",
    "llama": "model.layers.1.mlp.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.1.w3.weight",
}


def is_chosen(parameter) -> bool:
    """Whether a parameter, or a shard of one, is the one in which the mistake is made."""
    return placement_of(parameter).name in WHERE.values()


class GradientTimes(Trainer):
    """One parameter's gradient is multiplied by a factor, after the sum over ranks."""

    factor = 1.0

    def compute_gradient(self, step):
        loss = super().compute_gradient(step)
        for p in self.ddp.parameters():
            if is_chosen(p):
                p.grad *= self.factor
        return loss


class AThousandthMore(GradientTimes):
    factor = 1.001


class NeverTrained(GradientTimes):
    factor = 0.0


class WrongSign(GradientTimes):
    factor = -1.0


class AnotherSample(Trainer):
    """The first sample of each step is that of the next step."""

    def __init__(self, *args):
        super().__init__(*args)
        right = self.batches.batch

        def batch(step, samples):
            inputs, targets = (np.array(ids) for ids in right(step, samples))
            if 0 in samples:
                inputs[0], targets[0] = (ids[0] for ids in right(step + 1, samples))
            return inputs, targets

        self.batches.batch = batch


class CountsTwice(Trainer):
    """The gradient norm counts one parameter twice."""

    def _clip_grad_norm(self, max_norm):
        norm = super()._clip_grad_norm(max_norm)
        square = 0.0
        for name, gradient in self.state_dict(gradients=True).items():
            if name in WHERE.values():
                square = float((gradient.astype(np.float64) ** 2).sum())
        square = float(self.mesh.world.all_gather_bytes(repr(square).encode())[0])
        return math.sqrt(norm**2 + square)


class LastMoment(AdamW):
    """One parameter is updated with the first moment of the step before; the moments themselves are right."""

    def update(self, i, parameter, gradient):
        values = self.values()[i]
        before, moment = values.copy(), self.exp_avg[i].copy()
        super().update(i, parameter, gradient)
        if is_chosen(parameter):
            correction = math.sqrt(1 - self.betas[1] ** self.steps)
            step_size = self.lr / (1 - self.betas[0] ** self.steps)
            update = step_size * moment / (np.sqrt(self.exp_avg_sq[i]) / correction + self.eps)
            decay = 1 - self.lr * self.weight_decay * parameter.decays
            values[...] = before * decay - update
            parameter.data[...] = values


class UpdatesWithTheLastMoment(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.optimizer.__class__ = LastMoment


MISTAKES = (AThousandthMore, NeverTrained, WrongSign, AnotherSample, CountsTwice, UpdatesWithTheLastMoment)
