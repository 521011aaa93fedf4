"""Training in floats of 2 bytes, bfloat16 and float16: rounding, AdamW with float32 copies, and the loss scale.

After `enable_two_bytes()`, a node whose inputs have 2 bytes runs forward and backward on float32 copies. The result,
the saved arrays and the gradients of the inputs are rounded to 2 bytes. Two things stay float32: saved arrays that are
smaller than the result, such as a log-sum-exp for each row, and gradients that are written into a `grad_buffer`. No
operation knows of this file.

Seams of the core: `node_wrappers`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import DTypeLike

from minipar.autograd.recompute import CheckpointFunction
from minipar.autograd.rules import Gradients, LazyGradient
from minipar.autograd.tensor import Function, Tensor, node_wrappers
from minipar.autograd.tensor import Mapping as MappingFunction
from minipar.backend import Array, xp
from minipar.memory import hold
from minipar.nn.optim import AdamW
from minipar.nn.parameter import Parameter

# ---- operations ------------------------------------------------------------------------------------------------------


def enable_two_bytes() -> None:
    """Let operations on floats of 2 bytes compute in float32 from now on, on all ranks of this process."""
    if rounded not in node_wrappers:
        node_wrappers.append(rounded)


def rounded(node: Function, inputs: Sequence[Any]) -> Function:
    """Return the node to run in the place of this one: one that rounds, if an input has 2 bytes."""
    moves = isinstance(node, MappingFunction | CheckpointFunction)  # they compute nothing themselves
    for x in inputs:
        if isinstance(x, Tensor) and x.dtype.itemsize == 2 and not moves:
            return Rounded(node, x.dtype)
    return node


class Rounded(Function):
    """A node around another one, which computes in float32; what stays is rounded to `dtype`."""

    def __init__(self, node: Function, dtype: DTypeLike) -> None:
        super().__init__()
        self.node = node
        self.dtype = dtype

    def operation_name(self) -> str:
        return self.node.operation_name()

    def forward(self, *arrays: Any) -> Array:
        self.node.needs = self.needs
        self.node.inputs = self.inputs
        output = self.node.forward(*[cast_floats(array, "float32") for array in arrays])
        self.saved = self.node.saved
        self.node.free()  # what it saved and where its inputs come from are this node's
        cast_arrays(self.saved, self.dtype, least=output.size)
        if output.ndim == 0:
            return output  # a sum, such as the loss
        return output.astype(self.dtype)

    def backward(self, grad: Array, **saved: Any) -> Gradients:
        self.saved = {}  # so that the arrays of 2 bytes are freed here
        cast_arrays(saved, "float32")
        gradients = self.node.backward(cast_floats(grad, "float32"), **saved)
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        results = []
        for x, gradient in zip(self.inputs, gradients, strict=True):
            results.append(self.round(x, gradient))
        return tuple(results)

    def round(self, x: Any, gradient: Any) -> Any:
        """Round an input's gradient, unless the input is a leaf that keeps its gradient in float32."""
        if not isinstance(x, Tensor):
            return cast_floats(gradient, self.dtype)
        if x.grad_buffer is None:
            return cast_floats(gradient, x.grad_dtype)
        return gradient


def cast_arrays(saved: dict[str, Any], dtype: DTypeLike, least: int = 0) -> None:
    """Convert the saved arrays that have at least so many elements, in place."""
    for name, value in saved.items():
        if isinstance(value, xp.ndarray) and value.size >= least:
            saved[name] = cast_floats(value, dtype)


def cast_floats(value: Any, dtype: DTypeLike) -> Any:
    """Convert an array of float32 or 2-byte floats, or a LazyGradient; return other values as they are."""
    if isinstance(value, LazyGradient):

        def compute(out: Array | None) -> Array:
            return cast_floats(value.compute(None), dtype)

        return LazyGradient(compute)
    is_array = isinstance(value, xp.ndarray)
    # V is the kind of bfloat16, which NumPy does not know by itself.
    if is_array and value.dtype.kind in "fV" and value.dtype.itemsize <= 4:
        return value.astype(dtype, copy=False)
    return value


# ---- the optimizer ---------------------------------------------------------------------------------------------------


class MixedPrecisionAdamW(AdamW):
    """AdamW that updates float32 copies, `masters`, of parameters in 2 bytes, which are too coarse for small updates.

    `masters` has None for each parameter of other dtypes. Source: Micikevicius et al. 2018, section 3.1.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        parameters = list(parameters)
        self.masters = [p.data.astype("float32") if p.dtype.itemsize == 2 else None for p in parameters]
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.kept["master"] = [master for master in self.masters if master is not None]
        hold("optimizer", *self.masters)

    def value(self, i: int) -> Array:
        """Return what is updated of parameter i: its master, or its data."""
        master = self.masters[i]
        return super().value(i) if master is None else master

    def update(self, i: int, parameter: Parameter, gradient: Array) -> None:
        master = self.masters[i]
        if master is not None and self.steps == 1:
            # A state may have been loaded after the optimizer was made.
            loaded = parameter.data
            if (master.astype(loaded.dtype) != loaded).any():
                master[...] = loaded
        super().update(i, parameter, gradient)
        if master is not None:
            parameter.data[...] = master

    def round_masters(self) -> None:
        """Round each master to its parameter's 2 bytes, after the masters were loaded."""
        for parameter, value in zip(self.parameters, self.values(), strict=True):
            parameter.data[...] = value


# ---- the loss scale of fp16 ------------------------------------------------------------------------------------------

# NB: PyTorch's is torch.amp.GradScaler. It has a flag of its own for an overflow, which every axis must reduce. Here
# the flag is the gradient's norm, which all ranks compute together in every step.
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
