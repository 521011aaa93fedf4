"""The loss scale of fp16.

NB: PyTorch's is torch.amp.GradScaler. It has a flag of its own for an overflow, which every axis must reduce. Here the
flag is the gradient's norm, which all ranks compute together in every step.
"""

from collections.abc import Sequence

from minipar.backend import xp
from minipar.nn.parameter import Parameter

GOOD_STEPS = 2000  # from one doubling to the next


class LossScale:
    """The factor of the loss. It halves when a step is not finite, and doubles after GOOD_STEPS good ones.

    `values` has the factor, the finite steps since it last changed (good_steps), and the steps without an update so far
    (skipped): all that a checkpoint needs.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {"factor": 2.0**16, "good_steps": 0, "skipped": 0}

    @property
    def factor(self) -> float:
        return self.values["factor"]

    def divide(self, parameters: Sequence[Parameter]) -> None:
        """Divide all gradients by the factor, in place."""
        for p in parameters:
            p.grad = xp.multiply(p.grad, 1 / self.factor, out=p.grad)

    def update(self, step_is_finite: bool) -> None:
        """Count a step. All ranks call it alike: their norm is the same."""
        values = self.values
        if not step_is_finite:
            values["skipped"] += 1
            values["good_steps"] = 0
            values["factor"] /= 2
            return
        values["good_steps"] += 1
        if values["good_steps"] == GOOD_STEPS:
            values["good_steps"] = 0
            values["factor"] *= 2
