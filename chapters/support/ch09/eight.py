"""Run a function of chapter 9 on eight ranks, whatever mpirun has started, and what 9.3, 9.5 and 9.6 need beside it."""

import pickle
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from minipar.comm import Communicator, run_local


def on_eight(comm: Communicator, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run work(comm, *arguments) on eight ranks. Return what each of them returned on rank 0, elsewhere nothing.

    They are the ranks of mpirun if it started eight, else eight threads of rank 0.
    """
    if comm.size == 8:
        results = comm.all_gather_bytes(pickle.dumps(work(comm, *arguments)))
        return [pickle.loads(each) for each in results] if comm.rank == 0 else []
    return run_local(8, work, *arguments) if comm.rank == 0 else []


def layout_of(size: int) -> str:
    """Return the flags of the layout that the chapter trains on any number of ranks: what divides it."""
    tp = 2 if size % 2 == 0 else 1
    if size % 4 == 0:
        pp = 2
    elif size % 3 == 0:
        pp = 3
    else:
        pp = 1
    dp = size // (tp * pp)
    flags = f"--dp {dp} --tp {tp} --pp {pp} --microbatches {2 * pp} --global-batch {2 * pp * dp}"
    return flags + (" --sequence-parallel" if tp > 1 else "")


def shared_directory(comm: Communicator) -> tuple[str, ExitStack]:
    """Make a temporary directory for all ranks. Return its path, and what removes it on rank 0 when it is closed."""
    stack = ExitStack()
    name = stack.enter_context(TemporaryDirectory()) if comm.rank == 0 else ""
    return comm.all_gather_bytes(name.encode())[0].decode(), stack


def one_after_another(steps: Iterable[list[tuple[float, list[Any]]]], ranks: Collection[int]) -> dict[str, Any]:
    """Join traced steps, each the seconds and the events of all ranks, into one trace of the given ranks."""
    events, begin = [], 0.0
    for step in steps:
        for event in (event for _, own in step for event in own):
            if event["pid"] in ranks and event["ph"] in "MX":
                events.append(event | ({"ts": event["ts"] + begin} if "ts" in event else {}))
        begin += 1e6 * max(seconds for seconds, _ in step)
    return {"traceEvents": events, "otherData": {"clock": "model"}}
