"""The array module: NumPy on the CPU, CuPy on a GPU, chosen once for the process.

Everything above writes `xp.add`, `xp.matmul`, ... and never names NumPy for numbers that live on the device. The two
doors between device and host are `to_host` and `from_host`; CuPy refuses every other crossing, and so does the tests'
strict stand-in, which is how the code stays honest on machines without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from minipar.errors import UsageError

Array = Any  # numpy.ndarray or cupy.ndarray: the two share an interface, not a type

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGEST_KEPT = 2**30  # bytes of one array


def keep_freed_memory() -> bool:
    """Make malloc keep freed arrays for the next ones, instead of handing them back to the system. Process-wide.

    By default glibc maps each large array by itself, and cuts off its heap's free end: each training step gets its
    activations as new pages, which the kernel must fault in and fill with zeros, one by one. Kept, they are there
    already, and equal steps take equal times. The price: a process that has reached its peak stays there.
    NB: PyTorch's caching allocator and CuPy's memory pool do the same on a GPU.

    False, and nothing done, where the C library has no mallopt (macOS, musl, Windows).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt(M_TRIM_THRESHOLD, -1)  # -1: never
    # Before 2.35 glibc refuses (0) more than half a thread's heap, 32 MiB; larger arrays are then mapped as ever.
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) or mallopt(M_MMAP_THRESHOLD, 2**25))


keep_freed_memory()


class _ArrayModule:
    """Forwards attribute access to the chosen module and remembers what it found, so `xp.add` costs one dict lookup."""

    def __init__(self) -> None:
        self._use(np)

    def _use(self, module: Any) -> None:
        self.__dict__.clear()
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["module"], name)
        self.__dict__[name] = value
        return value


xp: Any = _ArrayModule()


def use(module: Any) -> None:
    """Make `module` (numpy, cupy, or anything with their interface) the array module of this process."""
    xp._use(module)


@contextmanager
def using(module: Any) -> Iterator[None]:
    """`use(module)` inside a `with` block. Process-wide: not for two threads that want different modules."""
    previous = xp.module
    use(module)
    try:
        yield
    finally:
        use(previous)


def use_device(device: str, rank: int = 0) -> None:
    """Choose the array module by the name the command line uses: "cpu" (NumPy) or "cuda" (CuPy).

    Ranks take the GPUs of their host in turns, GPU number `rank` modulo how many there are; several may share one.
    Raises UsageError when CuPy is not installed or finds no GPU.
    """
    if device == "cpu":
        use(np)
        return
    if device != "cuda":
        raise UsageError(f"--device {device}: expected cpu or cuda")
    try:
        cupy: ModuleType = importlib.import_module("cupy")
    except ImportError as error:
        raise UsageError(f"--device cuda needs CuPy (pip install 'minipar[gpu]'): {error}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise UsageError(f"--device cuda: CuPy finds no usable GPU: {error}") from None
    if count == 0:
        raise UsageError("--device cuda: CuPy finds 0 GPUs on this machine")
    cupy.cuda.Device(rank % count).use()
    use(cupy)


def is_host(array: Array) -> bool:
    """True for a NumPy array, whose memory MPI can read."""
    return isinstance(array, np.ndarray)


def to_host(array: Array) -> np.ndarray:
    """The same numbers as a NumPy array: the array itself when it is one already, else a copy (`.get()`)."""
    return array if isinstance(array, np.ndarray) else array.get()


def from_host(array: np.ndarray) -> Array:
    """The same numbers as an array of the current module: the array itself under NumPy, else a copy on the device."""
    return array if xp.module is np else xp.asarray(array)


def synchronize() -> None:
    """Wait until the device has done its queued work; NumPy's is done when the call returns."""
    if hasattr(xp.module, "cuda"):
        xp.module.cuda.get_current_stream().synchronize()
