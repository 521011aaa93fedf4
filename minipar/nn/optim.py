"""SGD, AdamW, gradient clipping and the learning-rate schedule, in PyTorch's arithmetic.

An element's new value depends on that element's history alone, so any sharding of the parameters
gives the same bits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minipar.backend import Array, from_host, is_host, to_host, xp
from minipar.errors import UsageError
from minipar.memory import hold
from minipar.nn.parameter import Parameter, check_names, owners_of, zero_grad

# Elements that `squared_norm` sums at a time on the host: they stay in a core's cache.
BLOCK = 1 << 15


class Optimizer:
    """A list of parameters and the rule `update` for them.

    Weight decay applies to those of two or more dims.
    """

    lr = 0.0  # the learning rate of a rule that has one

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        if len(set(self.parameters)) < len(self.parameters):
            raise UsageError(
                "optimizer: a parameter is given twice, and every step would change it twice"
            )
        check_names(self.parameters)
        self.steps = 0  # taken so far
        for owner in owners_of(self.parameters):
            owner.check_optimizer(self.parameters)

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        """Change parameter i, which has this gradient."""
        raise TypeError(f"{type(self).__name__} does not define update")

    def step(self) -> None:
        """Update the parameters.

        Their owners, each once, act before gradients are read and after the update. RuntimeError if
        no parameter has a gradient, and if a step has used one of the gradients already.
        """
        owners = owners_of(self.parameters)
        for owner in owners:
            # Again, as a strategy may have been applied since the optimizer was made.
            owner.check_optimizer(self.parameters)
            owner.before_step(self.parameters)
        for parameter in self.parameters:
            parameter.fold_tied_gradients()
        check_gradients(self.parameters)
        self.steps += 1
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.update(i, parameter, parameter.grad)
                parameter.note_update()
        for owner in owners:
            owner.after_step()

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, and those that their owners keep."""
        zero_grad(self.parameters)


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

    It computes p -= lr v, where v = momentum v + g + wd p. wd is `weight_decay`, which is 0 below
    two dims. Parameters in 2 bytes have no masters here.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocity = [xp.zeros_like(p.data) for p in self.parameters] if momentum else []

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        gradient = gradient.astype(parameter.dtype, copy=False)
        if self.weight_decay and parameter.decays:
            gradient = gradient + self.weight_decay * parameter.data
        if self.momentum:
            v = self.velocity[i]
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
        hold("optimizer", *self.exp_avg, *self.exp_avg_sq)

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
        m = self.exp_avg[i]
        v = self.exp_avg_sq[i]
        step_size = self.lr / (1 - beta1**self.steps)
        root_correction = math.sqrt(1 - beta2**self.steps)
        m += (1 - beta1) * (gradient - m)
        v *= beta2
        v += (1 - beta2) * (gradient * gradient)
        if parameter.decays:
            value *= 1 - self.lr * self.weight_decay
        value -= step_size * (m / (xp.sqrt(v) / root_correction + self.eps))

    def moments(self, i: int) -> dict[str, Array]:
        """Return what this optimizer keeps of parameter i, by torch's names."""
        return {"exp_avg": self.exp_avg[i], "exp_avg_sq": self.exp_avg_sq[i]}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state on the host, in torch's format.

        It has `state` by parameter and `param_groups`. Of a model that is split or sharded it is
        this rank's part alone, and `holds` says which elements those are: every rank saves its own.
        Parameters are not in it.
        """
        numbers = list(range(len(self.parameters)))
        state = {}
        if self.steps:
            for i in numbers:
                arrays = {name: np.array(to_host(array)) for name, array in self.moments(i).items()}
                state[i] = {"step": self.steps, **arrays}
        group = {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "params": numbers,
        }
        holds = [p.describe() for p in self.parameters]
        return {"state": state, "param_groups": [group], "holds": holds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank, or from torch's AdamW.

        ValueError, before anything changes, for other parameters or another rank's.
        """
        own = [p.describe() for p in self.parameters]
        if state.get("holds", own) != own or len(state["param_groups"][0]["params"]) != len(own):
            remedy = "load it on the rank that saved it, in the same layout"
            raise ValueError(
                f"optimizer state of {state.get('holds')}, but this rank holds {own}: {remedy}"
            )
        (group,) = state["param_groups"]
        self.lr = group["lr"]
        self.betas = tuple(group["betas"])
        self.eps = group["eps"]
        self.weight_decay = group["weight_decay"]
        self.steps = 0
        for i in range(len(self.parameters)):
            saved = state["state"].get(i)
            for name, array in self.moments(i).items():
                if saved is None:
                    array[...] = 0
                elif name in saved:
                    array[...] = from_host(np.asarray(saved[name]).astype(array.dtype))
            if saved is not None:
                self.steps = int(saved["step"])


def squared_norm(arrays: Iterable[Array]) -> float:
    """Return the sum of all squares, in float64, array after array and block after block in order.

    Ranks that hold a chunk each, and one device that goes through the same chunks, get the same
    bits. On a device a block is a whole array, because a launch costs more than the cache saves.
    """
    total = 0.0
    for array in arrays:
        flat = array.reshape(-1)
        starts = range(0, flat.size, BLOCK)
        blocks = [flat[start : start + BLOCK] for start in starts] if is_host(flat) else [flat]
        for block in blocks:
            if block.dtype.itemsize == 2:
                block = block.astype("float32")
            total += float((block * block).sum(dtype="float64"))
    return total


def clip_grad_norm(
    parameters: Iterable[Parameter], max_norm: float | None, norm: float | None = None
) -> float:  # fmt: skip
    """Scale all gradients down to `max_norm` if their 2-norm is larger; return that norm.

    The factor is max_norm / (norm + 1e-6), as PyTorch's.
    A rank that holds a part of the gradients is given the `norm` of all of them.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.fold_tied_gradients()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if norm is None:
        norm = math.sqrt(squared_norm(gradients))
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / (norm + 1e-6)
    return norm


def learning_rate(
    step: int, *, lr: float, schedule: str, warmup_steps: int, total_steps: int
) -> float:  # fmt: skip
    """Return the learning rate of step 0, 1, ...

    It starts with nanoGPT's warm-up lr (step+1)/(warmup+1), then follows the schedule.
    "constant" is lr, "cosine" falls to lr/10 at the last step. Raises ValueError for another
    schedule.
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return lr
    if schedule != "cosine":
        raise ValueError(f"schedule {schedule!r}: expected constant or cosine")
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
