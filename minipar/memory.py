"""The memory ledger: what a rank holds, in bytes, by kind and at every moment.

Code that makes an array which outlives the call says what it is: `hold("gradients", array)`. Without a ledger that does
nothing. A ledger adds the bytes to its account and takes them off when the array is really freed (a weak reference
tells), so a reference that somebody forgot shows up as memory, not as a wrong sum.

    ledger = MemoryLedger()
    with ledger.recording():
        ...                               # build a model, train
    ledger.held["optimizer"], ledger.peak, ledger.peak_parts

Not counted: the scratch arrays inside one operation, Python objects, and what the MPI library allocates.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from minipar.backend import Array, xp

# parameters, gradients, optimizer: the model state of the ZeRO paper. activations: what forward keeps for backward, and
# the gradients on their way through it. buffers: copies that live briefly: gathered parameters, gradients before they
# are reduced, room for messages.
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")

_recording: ContextVar[MemoryLedger | None] = ContextVar("memory_ledger", default=None)


def hold(kind: str, *arrays: Any) -> None:
    """Note that the memory behind these arrays is of this kind (the first name it gets stays). No-op without a ledger.

    What is not an array is passed over, so that all attributes of an object can be given.
    """
    ledger = _recording.get()
    if ledger is not None:
        for array in arrays:
            if isinstance(array, xp.ndarray):
                ledger.hold(kind, array)


def enter(phase: str, restart: bool = False) -> None:
    """What follows happens in this phase of a step. No-op without a ledger."""
    ledger = _recording.get()
    if ledger is not None:
        ledger.enter(phase, restart)


def is_recording() -> bool:
    """Whether anybody keeps an account: asked where collecting what to hold would itself cost time."""
    return _recording.get() is not None


class MemoryLedger:
    """One rank's account.

    held         bytes now, by kind          moments      (phase, bytes by kind in the order of KINDS) after each change
    peak         the most bytes ever held    peak_parts   what they were made of
    """

    def __init__(self) -> None:
        self.held = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self.peak_parts = dict(self.held)
        self.moments: list[tuple[str, tuple[int, ...]]] = []
        self.phase = "setup"
        self._live: dict[int, Any] = {}  # id of an array that owns memory -> the finalizer that takes it off
        # A message in flight may be the last to hold an array, and another rank's thread the one that drops it.
        self._lock = threading.RLock()

    @contextmanager
    def recording(self) -> Iterator[MemoryLedger]:
        """`hold` writes to this ledger inside the block."""
        token = _recording.set(self)
        try:
            yield self
        finally:
            _recording.reset(token)

    def enter(self, phase: str, restart: bool = False) -> None:
        """What follows happens in this phase; `restart` forgets the moments so far (the peak stays)."""
        self.phase = phase
        if restart:
            self.moments = []
        self._note()

    def total(self) -> int:
        return sum(self.held.values())

    def hold(self, kind: str, array: Array) -> None:
        """Count the memory that `array` lies in, once, until it is freed."""
        while isinstance(getattr(array, "base", None), xp.ndarray):
            array = array.base  # a view holds no memory of its own
        with self._lock:
            if id(array) in self._live:
                return
            nbytes = array.nbytes
            self._live[id(array)] = weakref.finalize(array, self._freed, id(array), kind, nbytes)
            self._live[id(array)].atexit = False
            self._change(kind, nbytes)

    def _freed(self, key: int, kind: str, nbytes: int) -> None:
        with self._lock:
            del self._live[key]
            self._change(kind, -nbytes)

    def _change(self, kind: str, nbytes: int) -> None:
        self.held[kind] += nbytes
        self._note()
        if self.total() > self.peak:
            self.peak, self.peak_parts = self.total(), dict(self.held)

    def _note(self) -> None:
        self.moments.append((self.phase, tuple(self.held.values())))
