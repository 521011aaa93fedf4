"""SGD, AdamW and the learning-rate schedule, in PyTorch's arithmetic.

An element's new value depends on that element's history alone, so any sharding of the parameters
gives the same bits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minipar.backend import Array, from_host, on_device, to_host, xp
from minipar.memory import hold
from minipar.nn.parameter import Parameter, owners_of, zero_grad


class Optimizer:
    """A list of parameters, the rule `update` for them, and the arrays that the rule keeps."""

    lr = 0.0  # the learning rate of a rule that has one
    update: Callable[[int, Parameter, Array], None]  # changes parameter i, which has this gradient

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        self.steps = 0  # taken so far
        self.kept: dict[str, list[Array]] = {}  # what the rule keeps, by name: an array of each parameter

    def step(self) -> None:
        """Update the parameters.

        Their owners, each once, act before gradients are read and after the update. RuntimeError if
        no parameter has a gradient, and if a step has used one of the gradients already.
        """
        owners = owners_of(self.parameters)
        for owner in owners:
            owner.check_optimizer(self.parameters)
            owner.before_step(self.parameters)
        for parameter in self.parameters:
            parameter.fold_tied_gradients()
        check_gradients(self.parameters)
        self.steps += 1
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.update(i, parameter, on_device(parameter.grad))
                parameter.used_gradient = parameter.grad
        for owner in owners:
            owner.after_step()

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, and those that their owners keep."""
        zero_grad(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps taken and, on the host, a copy of the arrays that the rule keeps.

        Of a model that is split or sharded it is this rank's part alone, and `holds` says which
        elements those are: every rank saves its own. Parameters and settings, such as lr, are not in it.
        """
        holds = [p.describe() for p in self.parameters]
        state = {"steps": self.steps, "holds": holds}
        for name, arrays in self.kept.items():
            state[name] = [np.array(to_host(array)) for array in arrays]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank.

        ValueError, before anything changes, for other parameters or another rank's.
        """
        holds = [p.describe() for p in self.parameters]
        if state["holds"] != holds:
            remedy = "load it on the rank that saved it, in the same layout"
            raise ValueError(
                f"optimizer state of {state['holds']}, but this rank holds {holds}: {remedy}"
            )
        self.steps = state["steps"]
        for name, arrays in self.kept.items():
            for array, saved in zip(arrays, state[name], strict=True):
                array[...] = from_host(saved)


def check_gradients(parameters: Sequence[Parameter]) -> None:
    """Raise RuntimeError if a step would do nothing, or use gradients a second time.

    This compares arrays, so a gradient that the program itself has assigned is a new one. Gradients
    in flat storage are the same array in each step; the strategy that keeps it knows which were used.
    """
    remedy = "call loss.backward() before step(), and optimizer.zero_grad() after it"
    if any(p.size for p in parameters) and all(p.grad is None for p in parameters):
        raise RuntimeError(f"optimizer.step(): no parameter has a gradient; {remedy}")
    for p in parameters:
        if p.grad is not None and p.grad is p.used_gradient and p.grad_buffer is None:
            raise RuntimeError(
                f"optimizer.step() would use the gradients of the last step again; {remedy}"
            )


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    It computes p -= lr v, where v = momentum v + g.
    """

    def __init__(self, parameters: Iterable[Parameter], lr: float = 1e-3, momentum: float = 0.0) -> None:
        super().__init__(parameters)
        self.lr = lr
        self.momentum = momentum
        if momentum:
            self.kept["velocity"] = [xp.zeros_like(p.data) for p in self.parameters]

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        gradient = gradient.astype(parameter.dtype, copy=False)
        if self.momentum:
            v = self.kept["velocity"][i]
            v *= self.momentum
            v += gradient
            gradient = v
        parameter.data -= self.lr * gradient


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW.

    Step t, with moments m (`exp_avg`) and v (`exp_avg_sq`), gradient g, and weight decay wd (0
    below two dims):

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        p = (1 - lr wd) p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    NB: as in PyTorch, parameters in 2 bytes are updated in 2 bytes; more/precision.py has an AdamW
    that updates copies in float32.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters)
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.exp_avg = [xp.zeros_like(value) for value in self.values()]
        self.exp_avg_sq = [xp.zeros_like(value) for value in self.values()]
        self.kept = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        hold("optimizer", *self.exp_avg, *self.exp_avg_sq)
        # On a GPU all operations on an element are one kernel.
        self.arithmetic = adamw if xp.module is np else xp.fuse(adamw)

    def value(self, i: int) -> Array:
        """Return what is updated of parameter i: its data."""
        return self.parameters[i].data

    def values(self) -> list[Array]:
        """Return what is updated of each parameter."""
        return [self.value(i) for i in range(len(self.parameters))]

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        value = self.value(i)
        gradient = gradient.astype(value.dtype, copy=False)
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.steps)
        root_correction = math.sqrt(1 - beta2**self.steps)
        decay = 1 - self.lr * self.weight_decay if parameter.decays else 1.0
        m = self.exp_avg[i]
        v = self.exp_avg_sq[i]
        self.arithmetic(value, m, v, gradient, beta1, beta2, step_size, root_correction, self.eps, decay)


def adamw(
    value: Array,
    m: Array,
    v: Array,
    gradient: Array,
    beta1: float,
    beta2: float,
    step_size: float,
    root_correction: float,
    eps: float,
    decay: float,
) -> None:
    """Change a parameter's value and its two moments, in place: each element by itself.

    step_size is lr / (1 - b1^t), root_correction is sqrt(1 - b2^t), and decay is 1 - lr wd, or 1.
    """
    m += (1 - beta1) * (gradient - m)
    v *= beta2
    v += (1 - beta2) * (gradient * gradient)
    value *= decay
    value -= step_size * (m / (xp.sqrt(v) / root_correction + eps))


def learning_rate(step: int, lr: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of step 0, 1, ...

    It starts with nanoGPT's warm-up lr (step+1)/(warmup+1), then follows the schedule.
    "constant" is lr, "cosine" falls to lr/10 at the last step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return lr
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
