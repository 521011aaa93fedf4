"""The messages of collectives for the page on which one steps through them, from real runs on threads.

An element's value tells its chunk and the ranks whose contributions it holds (chapters/support/animate.py), so nothing
about an algorithm is assumed here. A run is {"rounds": [[message, ...], ...], "states": [...]}: a message is [source,
destination, [[slot, contributions], ...]], and states[k][rank][slot] are the contributions, as bits of ranks, that a
slot holds before round k; 0 is nothing.
"""

import json
from collections.abc import Callable

import numpy as np

from chapters.support.animate import CHUNK, messages_of
from chapters.support.ch11 import animate_ring
from minipar.comm import Communicator, chunk_bounds

Run = dict[str, list]
POWERS = (2, 4, 8)
ALL = tuple(range(2, 9))
NAMED = ("recursive_doubling", "recursive_halving")  # all-reduces for powers of two


def own_values(comm: Communicator) -> np.ndarray:
    """Return one element for each chunk that says: chunk c, the contribution of this rank."""
    return (np.arange(comm.size, dtype=np.int64) + 1) * CHUNK + (1 << comm.rank)


def decoded(values: np.ndarray) -> list[list[int]]:
    """Return [chunk, contributions] of each element."""
    pairs = []
    for value in values.tolist():
        high, contributions = divmod(value, CHUNK)
        pairs.append([high // contributions.bit_count() - 1, contributions])
    return pairs


def all_reduce(algorithm: str) -> Callable[[Communicator], None]:
    """Return the program of an all-reduce by this algorithm."""
    return lambda comm: comm.all_reduce(own_values(comm), algorithm=algorithm)


def reduce_scatter(comm: Communicator) -> None:
    """Sum over a ring; each rank keeps one chunk."""
    comm.reduce_scatter(own_values(comm), algorithm="ring")


def hierarchical(comm: Communicator) -> None:
    """Sum inside each of two hosts, then between them, then hand out inside."""
    inside, across = comm.split_into(2)
    x = own_values(comm)
    chunk = x[slice(*chunk_bounds(x.size, inside.size)[inside.rank])]
    chunk[...] = inside.reduce_scatter(x.copy(), algorithm="ring")
    across.all_reduce(chunk, algorithm="recursive_doubling")
    inside.all_gather(chunk.copy(), x, algorithm="ring")


def all_to_all(comm: Communicator) -> None:
    """Send chunk j to rank j."""
    comm.all_to_all(own_values(comm), algorithm="pairwise")


def all_gather(comm: Communicator) -> None:
    """Gather the chunks of all ranks, as ZeRO stage 3 does before a unit computes."""
    x = own_values(comm)
    comm.all_gather(x[comm.rank : comm.rank + 1].copy(), x.copy(), algorithm="ring")


def rounds_of(ranks: int, program: Callable[[Communicator], None]) -> list[list[list]]:
    """Run a program in which each rank sends one message a round. Return the messages of each round."""
    log, _ = messages_of(ranks, program)
    rounds: list[list[list]] = []
    sent = [0] * ranks
    for source, dest, values in log:
        if len(rounds) == sent[source]:
            rounds.append([])
        rounds[sent[source]].append([source, dest, decoded(values)])
        sent[source] += 1
    return [sorted(messages) for messages in rounds]


def add_states(rounds: list[list[list]], first: list[list[int]]) -> Run:
    """Return a run: what arrives is added, or replaces a part of itself."""
    states = [first]
    for messages in rounds:
        now = [list(row) for row in states[-1]]
        for _, dest, cells in messages:
            for slot, carried in cells:
                own = states[-1][dest][slot]
                now[dest][slot] = carried if carried & own else carried | own
        states.append(now)
    return {"rounds": rounds, "states": states}


def sum_run(ranks: int, program: Callable[[Communicator], None]) -> Run:
    """Return the run of a sum: every rank begins with its own contribution to each chunk."""
    return add_states(rounds_of(ranks, program), [[1 << rank] * ranks for rank in range(ranks)])


def exchange_run(ranks: int) -> Run:
    """Return the run of an all-to-all: slot j of a rank is what rank j sends to it."""
    rounds = []
    for messages in rounds_of(ranks, all_to_all):
        for _, dest, cells in messages:
            assert [chunk for chunk, _ in cells] == [dest]
        rounds.append([[source, dest, [[source, cells[0][1]]]] for source, dest, cells in messages])
    return add_states(rounds, [[1 << rank if slot == rank else 0 for slot in range(ranks)] for rank in range(ranks)])


def gather_run(ranks: int) -> Run:
    """Return the run of ZeRO stage 3 for one unit: gather, use, and free all but the own shard."""
    own = [[1 << rank if slot == rank else 0 for slot in range(ranks)] for rank in range(ranks)]
    rounds = []
    for messages in rounds_of(ranks, all_gather):
        rounds.append([[source, dest, [[chunk, 1 << chunk] for chunk, _ in cells]] for source, dest, cells in messages])
    run = add_states(rounds, own)
    return {"rounds": [*run["rounds"], []], "states": [*run["states"], own]}


def attention_run(ranks: int) -> Run:
    """Return the run of ring attention: slot j says that this rank has attended to the keys and values of rank j."""
    journey = animate_ring.record(ranks=ranks)
    first = [[1 << rank if slot == rank else 0 for slot in range(ranks)] for rank in range(ranks)]
    rounds = []
    for before, after in zip(journey.owners, journey.owners[1:], strict=False):
        messages = []
        for dest, owner in enumerate(after):
            messages.append([before.index(owner), dest, [[owner, 1 << owner]]])
        rounds.append(messages)
    return add_states(rounds, first)


def runs() -> dict[str, dict[int, Run]]:
    """Return {collective: {number of ranks: run}}."""
    return {
        "ring": {p: sum_run(p, all_reduce("ring")) for p in ALL},
        "doubling": {p: sum_run(p, all_reduce("recursive_doubling")) for p in POWERS},
        "halving": {p: sum_run(p, all_reduce("recursive_halving")) for p in POWERS},
        "hierarchical": {p: sum_run(p, hierarchical) for p in (4, 6, 8)},
        "scatter": {p: sum_run(p, reduce_scatter) for p in ALL},
        "exchange": {p: exchange_run(p) for p in ALL},
        "gather": {p: gather_run(p) for p in ALL},
        "attention": {p: attention_run(p) for p in ALL},
    }


def script() -> str:
    """Return the runs as a script that the page loads before its player."""
    return f"const RUNS = {json.dumps(runs(), separators=(',', ':'))};\n"
