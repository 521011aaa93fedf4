"""Deal work out to the ranks, and gather values from all. They travel as JSON: tuples become lists."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from minipar.comm import Communicator


def from_all(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value, in the order of the ranks, on every rank."""
    return [json.loads(each) for each in comm.all_gather_bytes(json.dumps(value).encode())]


def shared(comm: Communicator, work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Compute work(*job) for each job, dealt out in turn to the ranks. Return all results, in order, on every rank."""
    results = from_all(comm, [work(*job) for job in jobs[comm.rank :: comm.size]])
    return [results[i % comm.size][i // comm.size] for i in range(len(jobs))]
