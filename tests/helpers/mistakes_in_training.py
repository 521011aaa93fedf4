"""Trainers that make one mistake each, which `--verify` must see: {name: (flags, trainer, what shows it)}."""

import math

import numpy as np

from minipar.backend import xp
from minipar.more.precision import MixedPrecisionAdamW
from minipar.parallel.placement import placement_of
from minipar.train.data import Batches
from minipar.train.trainer import Trainer

# The parameter in which a mistake is made, by model: split by tp, in the middle of the model.
WHERE = (
    "h.1.mlp.c_fc.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.block_sparse_moe.experts.1.w3.weight",
)


def is_chosen(parameter) -> bool:
    """Whether a parameter, or a shard of one, is the one in which the mistake is made."""
    return placement_of(parameter).name in WHERE


def overriding(method: str, function, base: type[Trainer] = Trainer) -> type[Trainer]:
    """A trainer whose method is function(trainer, the right method, ...)."""

    def overridden(self, *args):
        return function(self, getattr(super(kind, self), method), *args)

    kind = type("Mistaken", (base,), {method: overridden})
    return kind


def changing(function) -> type[Trainer]:
    """A trainer that is changed by function(trainer) when it is made."""

    def __init__(self, *args):
        super(kind, self).__init__(*args)
        function(self)

    kind = type("Mistaken", (Trainer,), {"__init__": __init__})
    return kind


def gradient_times(factor: float) -> type[Trainer]:
    """One parameter's gradient is multiplied by a factor, after the sum over ranks."""

    def gradient(self, right, step):
        loss = right(step)
        for p in self.ddp.parameters():
            if is_chosen(p):
                p.grad *= factor
        return loss

    return overriding("gradient", gradient)


def forget_the_sum_over_tensor_ranks(trainer):
    trainer.ddp.before_reduce = None


def add_row_biases_on_every_rank(trainer):
    layer = trainer.model.h[1].mlp.c_proj
    right = layer.forward
    layer.forward = lambda x: right(x) + layer.bias * (trainer.mesh.tp.size - 1.0)


def lose_the_tied_gradient(trainer):
    trainer.pipeline.fetch_tied_gradient = lambda: None


def keep_the_tied_weight(trainer):
    trainer.pipeline.send_tied_weight = lambda whole: None


def never_gather(trainer):
    trainer.ddp.contract.share_updates = lambda: None


def count_positions_from_0(trainer):
    trainer.model.positions = lambda count: xp.arange(count)


class LateSample(Batches):
    """The first sample of each step is that of the next step."""

    def batch(self, step, samples):
        inputs, targets = super().batch(step, samples)
        if 0 in samples:
            later = super().batch(step + 1, [0])
            inputs[0], targets[0] = later[0][0], later[1][0]
        return inputs, targets


def take_another_sample(trainer):
    trainer.batches = LateSample(**vars(trainer.batches))


def take_the_first_microbatch(self, right, replica, microbatch):
    return right(replica, 0)


def count_a_parameter_twice(self, right, max_norm):
    """In the gradient norm."""
    norm = right(max_norm)
    square = 0.0
    for name, gradient in self.state_dict(gradients=True).items():
        if name in WHERE:
            square = float((gradient.astype(np.float64) ** 2).sum())
    square = float(self.mesh.world.all_gather_bytes(repr(square).encode())[0])
    return math.sqrt(norm**2 + square)


def report_a_tenth_more(self, right, step):
    return right(step) * 1.1


class LastMoment(MixedPrecisionAdamW):
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


def update_with_the_last_moment(trainer):
    trainer.optimizer.__class__ = LastMoment


def decay_nothing(trainer):
    for p in trainer.ddp.parameters():
        p.decays = False


PIPELINE = "--pp 2 --microbatches 2"
LOSS, NORM, NEXT = "the loss of step 1", "the gradient norm of step 1", "the loss of step 2"
MISTAKES = {
    "a gradient times 3": ("--dp 4", gradient_times(3.0), NORM),
    "a gradient times 1.01": ("--tp 2", gradient_times(1.01), NORM),
    "a gradient of another sign": ("--cp 2", gradient_times(-1.0), NEXT),
    "a parameter that is never trained": ("--model mixtral --dp 2 --ep 2", gradient_times(0.0), NORM),
    "a partial sum left out": ("--tp 2 --sequence-parallel", changing(forget_the_sum_over_tensor_ranks), NORM),
    "a row bias added by every rank": ("--tp 2", changing(add_row_biases_on_every_rank), NORM),
    "a lost tied gradient": (PIPELINE, changing(lose_the_tied_gradient), NORM),
    "a tied weight not sent": (PIPELINE, changing(keep_the_tied_weight), NEXT),
    "ZeRO without its gather": ("--dp 2 --zero-stage 1", changing(never_gather), NEXT),
    "a microbatch counted twice": ("--dp 2 --microbatches 2", overriding("samples", take_the_first_microbatch), LOSS),
    "positions from 0 on each rank": ("--cp 2", changing(count_positions_from_0), LOSS),
    "a sample of the next step": (PIPELINE, changing(take_another_sample), LOSS),
    "a norm that counts twice": ("--tp 2", overriding("clip_grad_norm", count_a_parameter_twice), NORM),
    "a loss that is a tenth more": ("--cp 2", overriding("gradient", report_a_tenth_more), LOSS),
    "the moment of the last step": ("--dp 4 --zero-stage 3", changing(update_with_the_last_moment), NEXT),
    "nothing decays": ("--dp 2 --zero-stage 2", changing(decay_nothing), NEXT),
}
