"""Jobs dealt out to the ranks of a chapter: each job is done once, and every rank gets all results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from minipar.comm import Communicator


def shared(comm: Communicator, work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Compute work(*job) for each job, dealt out in turn to the ranks. Return all results, in order, on every rank.

    Results travel as JSON: tuples arrive as lists.
    """
    mine = json.dumps([work(*job) for job in jobs[comm.rank :: comm.size]]).encode()
    results = [json.loads(part) for part in comm.all_gather_bytes(mine)]
    return [results[i % comm.size][i // comm.size] for i in range(len(jobs))]
