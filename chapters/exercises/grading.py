"""The instruments of the graders: ranks as threads with a deadline, comparisons, and hints.

A grader is a module `graders/eNN_name.py` with a function `grade(solution)`, where `solution` is the module with the
reader's code. It returns if everything is right (in exercises with a score, the score in words), and raises a Hint that
names the mistake otherwise. `SOLVED` says in one sentence what a right solution has reached.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minipar.comm import run_local
from minipar.errors import CommunicationError

DEADLINE = 20.0  # seconds for one call on all ranks; the longest reference solution takes less than one
TOLERANCE = 1e-12  # of the largest element


class Hint(AssertionError):
    """What is wrong with a solution, in words for its author."""


class NotWritten(Hint):
    """The skeleton as it comes."""


class WatchedSend:
    """A message on its way. Its array must stay as it is until the message is done."""

    def __init__(self, message: Any, array: np.ndarray) -> None:
        self.message, self.array, self.values, self.done = message, array, array.copy(), False

    def wait(self) -> Any:
        result, self.done = self.message.wait(), True
        if not np.array_equal(self.array, self.values):
            raise Hint("an array changed while it was being sent: wait for the send before you write into its array")
        return result


class RingCommunicator:
    """A Communicator whose collectives are rings at any size, so that their bytes are those of the formulas."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.sends: list[WatchedSend] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def isend(self, array: np.ndarray, dest: int, tag: int = 0) -> WatchedSend:
        send = WatchedSend(self.comm.isend(array, dest, tag), array)
        self.sends.append(send)
        return send

    def all_reduce(self, x: Any, op: str = "sum", algorithm: str = "ring", async_op: bool = False) -> Any:
        if not isinstance(x, np.ndarray):
            raise Hint(f"all_reduce was given {type(x).__name__} {x!r}; it takes an array: np.array([value])")
        return self.comm.all_reduce(x, op, algorithm, async_op)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: str = "sum", algorithm: str = "ring", async_op: bool = False
    ) -> Any:
        return self.comm.reduce_scatter(x, out, op, algorithm, async_op)

    def all_gather(self, chunk: Any, out: Any = None, algorithm: str = "ring", async_op: bool = False) -> Any:
        return self.comm.all_gather(chunk, out, algorithm, async_op)


def names() -> list[str]:
    """List the exercises, in order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("e[0-9][0-9]_*.py"))


def on_ranks(solution: ModuleType, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(comm, *arguments)` on that many threads. Return the ranks' results.

    Hint if the ranks wait for each other, if they take longer than DEADLINE, or if the solution raises an exception.
    """

    def watched(comm: Any) -> Any:
        ring = RingCommunicator(comm)
        result = function(ring, *arguments)
        if not all(send.done for send in ring.sends):
            raise Hint("a send is never waited for: its array could change before it is read")
        return result

    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.extend(run_local(ranks, watched))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    if thread.is_alive():
        raise Hint(f"with {counted(ranks, 'rank')}, no result after {DEADLINE:g} s. {_places(solution)}")
    if failures:
        raise _explained(solution, f"with {counted(ranks, 'rank')}, ", failures[0])
    return results


def call(solution: ModuleType, function: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
    """Call a function of the solution that needs no ranks. If it raises an exception, Hint, beginning with `where`."""
    try:
        return function(*arguments)
    except Exception as error:
        raise _explained(solution, where, error) from None


def counted(count: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _explained(solution: ModuleType, where: str, error: BaseException) -> BaseException:
    """Turn an exception into a Hint that begins with `where`."""
    if isinstance(error, Hint):
        return error
    if isinstance(error, NotImplementedError):
        return NotWritten(f"not written yet: replace {error} in {solution.__name__.split('.')[-1]}.py")
    if isinstance(error, CommunicationError) and "counts" in str(error):
        return Hint(f"{where}{error}")
    if isinstance(error, CommunicationError):
        return Hint(
            f"{where}a message has no partner of its size. Does every send have its receive, and does "
            f"a rank wait for a send before it has started the receive that its neighbour waits for?\n{error}"
        )
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == solution.__file__]
    place = f" in line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    who = next(iter(getattr(error, "__notes__", ())), "")
    return Hint(f"{where}{f'{who} ' if who else ''}{type(error).__name__}: {error}{place}")


def _places(solution: ModuleType) -> str:
    """Say in which line of the solution each rank is."""
    frames, places = sys._current_frames(), []
    for thread in threading.enumerate():
        stack = traceback.extract_stack(frames[thread.ident]) if thread.ident in frames else ()
        own = [frame for frame in stack if frame.filename == solution.__file__]
        if own and thread.name.startswith("rank "):
            places.append(f"{thread.name} is in line {own[-1].lineno}: {own[-1].line}")
    return "; ".join(places)


def same(value: Any, expected: Any) -> bool:
    """Tell whether two arrays have one shape and agree within TOLERANCE of the largest element."""
    value, expected = np.asarray(value), np.asarray(expected)
    if value.shape != expected.shape or not np.all(np.isfinite(value)):
        return False
    return value.size == 0 or float(abs(value - expected).max()) <= TOLERANCE * max(1e-300, float(abs(expected).max()))


def expect(value: Any, expected: Any, what: str, mistakes: Mapping[str, Any] | None = None) -> None:
    """Raise a Hint unless `value` is `expected`. `mistakes` gives by its hint each mistake's value, or a tuple."""
    if value is None:
        raise Hint(f"{what}: the function returned None")
    if same(value, expected):
        return
    for hint, wrong in (mistakes or {}).items():
        if any(same(value, each) for each in (wrong if isinstance(wrong, tuple) else (wrong,))):
            raise Hint(f"{what}: {hint}")
    value, expected = np.asarray(value), np.asarray(expected)
    if value.shape != expected.shape:
        raise Hint(f"{what}: the shape is {value.shape}, expected {expected.shape}")
    difference = np.nan_to_num(abs(value - expected), nan=np.inf)
    place = np.unravel_index(int(np.argmax(difference)), value.shape) if value.ndim else ()
    raise Hint(f"{what}: wrong value; element {list(map(int, place))} is {value[place]}, expected {expected[place]}")


def require(condition: bool, hint: str) -> None:
    """Raise a Hint unless the condition holds."""
    if not condition:
        raise Hint(hint)


def random(*key: int) -> np.random.Generator:
    """Return a generator for this key, the same in every run."""
    return np.random.default_rng(key)
