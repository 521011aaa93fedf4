"""The loss scale of fp16, and the steps that are skipped because a gradient is not finite.

NB: PyTorch's is torch.amp.GradScaler. It has a flag of its own for an overflow, which every axis
must reduce. Here the flag is the gradient's norm, which all ranks compute together in every step.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

from minipar.backend import xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import placement_of
from minipar.train.checkpoint import Checkpoint
from minipar.train.settings import RunConfig

LOSS_SCALE = 2.0**16  # at the start
GOOD_STEPS = 2000  # from one doubling to the next

DIVERGED = "training has diverged: {}; try a smaller --lr than {:g}, --warmup-steps or --clip-grad"


class LossScaler:
    """The factor of the loss that shifts small gradients into the range of fp16; 1 in other dtypes.

    scale       the factor
    good_steps  finite steps since the last one that was not, or since fp16's scale last changed
    skipped     steps without an update so far
    """

    def __init__(self, run: RunConfig, checkpoint: Checkpoint | None) -> None:
        self.is_fp16 = run.dtype == "float16"
        self.can_skip = self.is_fp16 or run.skip_nonfinite
        self.scale = LOSS_SCALE if self.is_fp16 else 1.0
        self.good_steps = 0
        self.skipped = 0
        if checkpoint is not None:
            saved = checkpoint.manifest
            self.scale, self.good_steps = saved.get("loss_scale", (self.scale, 0))
            self.skipped = saved.get("skipped", 0)  # older checkpoints do not count

    def unscale(self, parameters: Sequence[Parameter]) -> None:
        """Divide the gradients by the scale."""
        if self.scale == 1:
            return
        for p in parameters:
            p.grad = xp.multiply(p.grad, 1 / self.scale, out=p.grad)

    def update(self, step_is_finite: bool) -> bool:
        """Count a step, change fp16's scale, and return whether training can go on.

        In fp16 a step that is not finite halves the scale, and training ends below 1. After
        GOOD_STEPS good steps the scale doubles. All ranks answer alike: their norm is the same.
        """
        if step_is_finite:
            self.good_steps += 1
            if self.is_fp16 and self.good_steps == GOOD_STEPS:
                self.scale *= 2
                self.good_steps = 0
            return True
        self.good_steps = 0
        self.skipped += 1
        if self.is_fp16:
            self.scale /= 2
        return self.can_skip and self.scale >= 1


def refuse_divergence(
    comm: Communicator, parameters: Sequence[Parameter], step: int, loss: float, grad_norm: float, lr: float
) -> NoReturn:
    """Raise the UsageError of a step that is not finite. All ranks call it.

    The error names the first rank whose gradient is not finite, and its first such parameter.
    """
    own = ""
    for p in parameters:
        if not xp.isfinite(p.grad).all():
            own = placement_of(p).name
            break
    first = ""
    for rank, name in enumerate(comm.all_gather_bytes(own.encode())):
        if name:
            first = f": rank {rank}, {name.decode()}"
            break
    problem = f"loss {loss:g} and gradient norm {grad_norm:g} in step {step + 1}{first}"
    raise UsageError(DIVERGED.format(problem, lr))


def is_finite(loss: float, grad_norm: float) -> bool:
    """Return whether neither a step's loss nor its gradient's norm is infinite or NaN."""
    return math.isfinite(loss) and math.isfinite(grad_norm)
