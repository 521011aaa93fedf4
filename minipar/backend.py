"""The array module (NumPy on the CPU, CuPy on a GPU), chosen once for the process.

All other code writes `xp.add`, `xp.matmul`, ... and never names NumPy for values on the device.
Only `to_host` and `from_host` copy between device and host. CuPy refuses every other copy, and so
does the tests' stand-in for it. A copy to the host waits for the device; one from the host does not.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 adds bfloat16 to NumPy
import numpy as np

from minipar.errors import UsageError

Value = TypeVar("Value")
Array = Any  # numpy.ndarray or cupy.ndarray: the two share an interface, not a type


class _ArrayModule:
    """A stand-in for the chosen module.

    It remembers the module's attributes, so `xp.add` costs one dict lookup.
    """

    module: Any = np

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(self.module, name)
        return value


xp: Any = _ArrayModule()


def use(module: Any) -> None:
    """Make `module` (numpy, cupy, or another module with their interface) the array module of all threads."""
    # Ranks that are threads all choose it, and the first may compute already.
    if module is not xp.module:
        xp.__dict__ = {"module": module}


@contextmanager
def setting(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Set a context variable inside a `with` block.

    Ranks that are threads of one process do not share its value.
    """
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


class _ThisRank(threading.local):
    """The rank that runs in this thread."""

    rank = 0  # in the world; `world` and `run_local` set it


this_rank = _ThisRank()


def use_device(device: str) -> None:
    """Compute with NumPy ("cpu") or, on a GPU, with CuPy ("cuda"): rank r takes GPU r modulo their number.

    Each rank calls it once, before it makes an array, such as a model. UsageError for another name, and
    if CuPy or a GPU is missing. NB: torch.cuda.set_device counts the GPUs alike.
    """
    if device == "cpu":
        use(np)
        return
    if device != "cuda":
        raise UsageError(f"device {device!r}: expected cpu or cuda")
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()  # CUDA's own error if there is none
    except Exception as error:
        needs = "cuda needs CuPy (pip install 'minipar[gpu]') and a GPU"
        raise UsageError(f"device {needs}: {error}") from None
    cupy.cuda.Device(this_rank.rank % count).use()
    use(cupy)


def is_host(array: Array) -> bool:
    """Return True for a NumPy array, whose memory MPI can read."""
    return isinstance(array, np.ndarray)


def module_of(array: Array) -> Any:
    """Return the module whose functions take this array: NumPy, or that of the device."""
    return np if is_host(array) else xp


def to_host(array: Array) -> np.ndarray:
    """Return the values as a NumPy array: the array itself if it is one, else a copy (`.get()`)."""
    return array if is_host(array) else array.get()


def from_host(array: np.ndarray) -> Array:
    """Return the values as an array of the current module: the array itself under NumPy, else a copy on the device."""
    return array if xp.module is np else xp.asarray(array)


def on_device(value: Any) -> Any:
    """Return what a user gives to an operation, with NumPy arrays, also those of an index, copied to the device."""
    if xp.module is np:
        return value
    if isinstance(value, tuple):
        return tuple([on_device(item) for item in value])
    return from_host(value) if is_host(value) else value


def read_values(values: Sequence[Array]) -> list[float]:
    """Return the values of arrays without dims, in one copy."""
    return to_host(xp.stack(values)).tolist() if values else []
