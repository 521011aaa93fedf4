"""The memory ledger: the bytes that a rank holds, by kind and at every moment.

Code that creates an array which outlives the call names its kind: `hold("gradients", array)`. A
ledger that is `recording()` adds the array's bytes to its sum and subtracts them when the array is
freed, which it learns from a weak reference. Scratch arrays of one computation, Python objects, and
allocations of the MPI library do not count; what arrives in a collective is a buffer until its end.
"""

import threading
import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar

from numpy.typing import DTypeLike

from minipar.backend import Array, setting, xp

# parameters, gradients and optimizer are the model state of the ZeRO paper. activations are the
# arrays that forward keeps for backward, and the gradients that pass through backward. buffers are
# copies that live briefly: gathered parameters, gradients before they are reduced, messages.
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")

_recording: "ContextVar[MemoryLedger | None]" = ContextVar("memory_ledger", default=None)


def hold(kind: str, *arrays: object) -> None:
    """Record that the memory of these arrays is of this kind; the first kind stays.

    Other values are ignored.
    """
    if (ledger := _recording.get()) is not None:
        for array in arrays:
            if isinstance(array, xp.ndarray):
                ledger.hold(kind, array)


def allocate(kind: str, size: int, dtype: DTypeLike) -> Array:
    """Make a flat array, without values, whose memory is of this kind."""
    array = xp.empty(size, dtype=dtype)
    hold(kind, array)
    return array


def enter(phase: str, restart: bool = False) -> None:
    """Start this phase of a training step; `restart` forgets the moments so far, but not the peak."""
    if (ledger := _recording.get()) is not None:
        ledger.phase = phase
        if restart:
            ledger.moments = []
        ledger.note()


class MemoryLedger:
    """The record of one rank's memory.

    held         bytes now, by kind          moments      (phase, bytes by kind in the order of KINDS) after each change
    peak         the most bytes ever held    peak_parts   bytes by kind at the peak
    """

    def __init__(self) -> None:
        self.held = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self.peak_parts = dict(self.held)
        self.moments: list[tuple[str, tuple[int, ...]]] = []
        self.phase = "setup"
        self._live: set[int] = set()  # the ids of the arrays that own this memory
        # A message in flight may hold an array's last reference, and another rank's thread may drop
        # it.
        self._lock = threading.RLock()

    def recording(self) -> "AbstractContextManager[MemoryLedger]":
        """Record in this ledger what the code inside the block holds."""
        return setting(_recording, self)

    def total(self) -> int:
        return sum(self.held.values())

    def hold(self, kind: str, array: Array) -> None:
        """Count the memory of `array`, once, until it is freed."""
        while isinstance(getattr(array, "base", None), xp.ndarray):
            array = array.base  # a view holds no memory of its own
        with self._lock:
            if id(array) not in self._live:
                self._live.add(id(array))
                weakref.finalize(array, self._freed, id(array), kind, array.nbytes).atexit = False
                self._change(kind, array.nbytes)

    def _freed(self, key: int, kind: str, nbytes: int) -> None:
        with self._lock:
            self._live.remove(key)
            self._change(kind, -nbytes)

    def _change(self, kind: str, nbytes: int) -> None:
        self.held[kind] += nbytes
        self.note()
        if self.total() > self.peak:
            self.peak, self.peak_parts = self.total(), dict(self.held)

    def note(self) -> None:
        """Add a moment: the bytes held now."""
        self.moments.append((self.phase, tuple(self.held.values())))
