"""A message's price between two ranks: alpha seconds and beta seconds per byte, from a ping-pong on the wall clock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from minipar.bench.fit import fit
from minipar.comm import Communicator, Network

SIZES = (0, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes
ROUNDS = 20  # there and back, at each turn
TURNS = 9


def measure(comm: Communicator) -> tuple[Network, list[dict[str, Any]]]:
    """(alpha and beta, a row for each size). Collective, two ranks or more, on the wall clock: ranks 0 and 1, 2 and 3,
    ... play at the same time; an odd one watches.

    seconds: of one way, the median over the turns, then over the pairs. The sizes take turns.
    """
    rooms = [np.zeros(nbytes, np.uint8) for nbytes in SIZES]
    peer = comm.rank ^ 1
    plays = peer < comm.size
    times = np.zeros((TURNS, len(SIZES)))
    for turn in range(TURNS):
        for i, room in enumerate(rooms):
            comm.barrier()
            if plays:
                times[turn, i] = _ping_pong(comm, room, peer) / (2 * ROUNDS)
    every = np.zeros((comm.size, len(SIZES)))
    every[comm.rank] = np.median(times, axis=0)
    comm.all_reduce(every)
    seconds = np.median(every[: comm.size // 2 * 2], axis=0)
    alpha, beta = fit([(1.0, float(nbytes)) for nbytes in SIZES], seconds.tolist()).tolist()
    network = Network(alpha, beta)
    rows = [
        {"bytes": nbytes, "seconds": float(found), "predicted": network.seconds(nbytes)}
        for nbytes, found in zip(SIZES, seconds, strict=True)
    ]
    return network, rows


def _ping_pong(comm: Communicator, room: np.ndarray, peer: int) -> float:
    """Wall seconds of ROUNDS round trips; the even rank serves."""
    start = time.perf_counter()
    for _ in range(ROUNDS):
        if comm.rank < peer:
            comm.isend(room, peer).wait()
            comm.irecv(room, peer).wait()
        else:
            comm.irecv(room, peer).wait()
            comm.isend(room, peer).wait()
    return time.perf_counter() - start
