"""SGD, AdamW, gradient clipping and the learning-rate schedule, in PyTorch's arithmetic.

Element-wise throughout: an element's new value depends on that element's history alone, so any sharding of the
parameters gives the same bits. The update runs over blocks that stay in the cache, with two scratch blocks and no other
temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from minipar.backend import Array, is_host, xp
from minipar.memory import hold
from minipar.nn.module import Parameter, owners_of, zero_grad

BLOCK = 1 << 15  # elements: a block of parameter, gradient, two moments and two scratch arrays stays in a core's cache


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """The arrays (of one size, contiguous) cut into matching 1-D blocks; on a device, one block: there launches cost,
    not caches.
    """
    flat = [array.reshape(-1) for array in arrays]
    size = flat[0].size
    step = BLOCK if is_host(flat[0]) else max(size, 1)
    for start in range(0, size, step):
        yield tuple(array[start : start + step] for array in flat)


class Optimizer:
    """A list of parameters and their update. Subclasses define `update`."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        for owner in owners_of(self.parameters):
            owner.check(self.parameters)

    def update(self) -> None:
        """Change every parameter that has a gradient."""
        raise TypeError(f"{type(self).__name__} does not define update")

    def step(self) -> None:
        """Update the parameters; the owners of parameters act before and after, each owner once."""
        owners = owners_of(self.parameters)
        for owner in owners:
            owner.check(self.parameters)  # again: a strategy may have been applied since the optimizer was made
            owner.before_step()
        self.update()
        for owner in owners:
            owner.after_step()

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters, and those that their owners keep."""
        zero_grad(self.parameters)


class SGD(Optimizer):
    """torch.optim.SGD: p -= lr * v with v = momentum * v + g + weight_decay * p.

    Weight decay applies to parameters of two or more dims. A parameter whose gradient is None is left alone.
    """

    def __init__(
        self, parameters: Iterable[Parameter], lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity: list[Array] = [xp.zeros_like(p.data) for p in self.parameters] if momentum else []
        hold("optimizer", *self.velocity)

    def update(self) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.fold_tied_gradients()
            if parameter.grad is None:
                continue
            update: Array = parameter.grad
            if self.weight_decay and parameter.decays:
                update = update + self.weight_decay * parameter.data
            if self.momentum:
                self.velocity[i] *= self.momentum
                self.velocity[i] += update
                update = self.velocity[i]
            parameter.data -= xp.multiply(update, self.lr)


class AdamW(Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019, decoupled weight decay).

    m += (1-b1)(g-m);  v = b2 v + (1-b2) g^2;  p = p (1 - lr wd) - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps).
    Weight decay applies to parameters of two or more dims. A parameter whose gradient is None is left alone.
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
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = 0
        self.exp_avg = [xp.zeros_like(p.data) for p in self.parameters]
        self.exp_avg_sq = [xp.zeros_like(p.data) for p in self.parameters]
        hold("optimizer", *self.exp_avg, *self.exp_avg_sq)

    def update(self) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.steps)
        root_correction = math.sqrt(1 - beta2**self.steps)
        for parameter, exp_avg, exp_avg_sq in zip(self.parameters, self.exp_avg, self.exp_avg_sq, strict=True):
            parameter.fold_tied_gradients()
            if parameter.grad is None:
                continue
            shrink = 1 - self.lr * self.weight_decay if parameter.decays else 1.0
            scratch = xp.empty(
                min(parameter.size, BLOCK) if is_host(parameter.data) else parameter.size, parameter.dtype
            )
            for p, g, m, v in _blocks(parameter.data, parameter.grad, exp_avg, exp_avg_sq):
                s = scratch[: p.size]
                xp.subtract(g, m, out=s)
                s *= 1 - beta1
                m += s
                xp.multiply(g, g, out=s)
                s *= 1 - beta2
                v *= beta2
                v += s
                xp.sqrt(v, out=s)
                s /= root_correction
                s += self.eps
                xp.divide(m, s, out=s)
                s *= step_size
                if shrink != 1.0:
                    p *= shrink
                p -= s


def squared_norm(arrays: Iterable[Array]) -> float:
    """The sum of all squares, in float64, array after array and block after block in order.

    The order is part of the contract: ranks that hold a chunk each, and one device that goes through the same chunks,
    get the same bits.
    """
    total = 0.0
    for array in arrays:
        for (block,) in _blocks(array):
            total += float((block * block).sum(dtype="float64"))
    return total


def clip_grad_norm(parameters: Iterable[Parameter], max_norm: float | None, norm: float | None = None) -> float:
    """The 2-norm of all gradients together; if `max_norm` is given and smaller, gradients are scaled by max_norm /
    (norm + 1e-6).

    torch.nn.utils.clip_grad_norm_. Returns the norm before clipping. `norm`, where it is known already: a rank that
    holds a shard of the gradients cannot find it alone, so ValueError if it is missing there.
    """
    parameters = list(parameters)
    if norm is None and any(getattr(parameter.owner, "sharded", False) for parameter in parameters):
        raise ValueError(
            "clip_grad_norm: this rank holds only shards of the gradients and cannot compute their norm alone; "
            "call clip_grad_norm of the wrapper that sharded the model"
        )
    gradients = []
    for parameter in parameters:
        parameter.fold_tied_gradients()
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if norm is None:
        norm = math.sqrt(squared_norm(gradients))
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / (norm + 1e-6)
    return norm


def learning_rate(step: int, *, lr: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The rate of step 0, 1, ...: linear warm-up lr (step+1)/(warmup+1), then constant, or a cosine down to lr/10 at
    the last step.

    The warm-up and the cosine are nanoGPT's. Raises ValueError for another schedule.
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return lr
    if schedule != "cosine":
        raise ValueError(f"schedule {schedule!r}: expected constant or cosine")
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
