"""Watch collectives: results (3.1), blocks (3.3, 3.4), messages (3.6), timelines (3.9), MPI's own (3.5 and more/)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from chapters.support.model_clock import traced
from minipar.bench.collectives import measure
from minipar.comm import ALGORITHMS, Communicator, Network, chunk_bounds, messages, run_local, wire_bytes


def watch_blocks(ranks: int, algorithm: Callable[..., Any], *titles: str) -> list[tuple[str, np.ndarray]]:
    """Run algorithm(comm, x, after_step), an all-reduce in place, and keep every rank's x after each step.

    x has one element per chunk. Rank r brings 2^r, so the bits of a partial sum are the ranks whose contributions are
    in it. Return (title, x of all ranks: (rank, chunk)) for the beginning and each step.
    """

    def watched(comm: Communicator) -> list[np.ndarray]:
        x = np.full(comm.size, 1 << comm.rank)
        frames = [x.copy()]
        algorithm(comm, x, lambda: frames.append(x.copy()))
        return frames

    steps = np.array(run_local(ranks, watched)).swapaxes(0, 1)  # (step, rank, chunk)
    return list(zip(titles, steps, strict=True))


def six_collectives(x: np.ndarray) -> dict[str, np.ndarray]:
    """Run the six collectives of 3.1 on threads, whose rank r brings x[r], one element per chunk.

    Return what all ranks have then: (rank, chunk), with 0 where a rank gets nothing.
    """

    def run(comm: Communicator) -> list[np.ndarray]:
        own, r = x[comm.rank], comm.rank
        on_rank_0 = comm.all_reduce(own.copy(), algorithm="ring") * (r == 0)  # the library has no reduce
        chunk = np.zeros_like(own)
        chunk[r : r + 1] = comm.reduce_scatter(own, algorithm="ring")
        gathered = comm.all_gather(own[r : r + 1].copy(), np.empty_like(own), algorithm="ring")
        everywhere = comm.all_reduce(own.copy(), algorithm="ring")
        return [comm.broadcast(own.copy(), 0), on_rank_0, everywhere, chunk, gathered, comm.all_to_all(own)]

    names = ("broadcast", "reduce", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    results = np.array(run_local(len(x), run)).swapaxes(0, 1)  # (collective, rank, chunk)
    return dict(zip(names, results, strict=True))


def hierarchical(comm: Communicator, x: np.ndarray, after_step: Callable[[], None]) -> None:
    """Set x = the sum over the ranks, two of which sit on each host: inside, between hosts, inside."""
    inside, across = comm.split_into(comm.size // 2)
    chunk = x[slice(*chunk_bounds(x.size, inside.size)[inside.rank])]
    chunk[...] = inside.reduce_scatter(x.copy(), algorithm="ordered")
    after_step()
    across.all_reduce(chunk, algorithm="ordered")
    after_step()
    inside.all_gather(chunk.copy(), x, algorithm="pairwise")
    after_step()


def count_calls(comm: Communicator, elements: int) -> list[dict[str, Any]]:
    """Run every algorithm of every collective once with float64 values, and count what this rank sends.

    Each row names the operation and holds what was counted ("messages", "bytes") beside the closed forms
    ("expected_messages", "expected").
    """
    own = slice(*chunk_bounds(elements, comm.size)[comm.rank])
    calls: dict[str, Callable[[np.ndarray, str], Any]] = {
        "all_reduce": lambda x, name: comm.all_reduce(x, algorithm=name),
        "reduce_scatter": lambda x, name: comm.reduce_scatter(x, algorithm=name),
        "all_gather": lambda x, name: comm.all_gather(x[own], x.copy(), algorithm=name),
        "all_to_all": lambda x, name: comm.all_to_all(x, algorithm=name),
        "broadcast": lambda x, name: comm.broadcast(x, algorithm=name),
    }
    rows = []
    for op, call in calls.items():
        for name in ALGORITHMS[op]:
            before = comm.traffic.messages(op), comm.traffic.bytes(op)
            call(np.ones(elements), name)
            form = "ordered" if name == "tree" else name  # a tree sends as many
            rows.append(
                {
                    "op": f"{op}, {name}",
                    "messages": comm.traffic.messages(op) - before[0],
                    "bytes": comm.traffic.bytes(op) - before[1],
                    "expected_messages": messages(op, form, comm.size, comm.rank),
                    "expected": wire_bytes(op, form, elements, 8, comm.size, comm.rank),
                }
            )
    return rows


def mpis_own_all_reduce(comm: Communicator, x: np.ndarray) -> np.ndarray:
    """Replace x by the sum over the ranks that mpirun started, with MPI's own all-reduce. Return x."""
    from mpi4py import MPI  # imported, it starts MPI

    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
    return x


def timeline(ranks: int, program: Callable[..., Any], *arguments: Any, network: Network) -> tuple[list[Any], Any]:
    """Run program(comm, *arguments) on simulated ranks under a trace. Return each rank's value, and the figure."""
    from visualize import plot_timeline  # it imports matplotlib, which only the rank that draws needs

    values, trace = traced(ranks, program, *arguments, network=network)
    return values, plot_timeline(trace, arrows=False)


def on_one_axis(figures: Mapping[str, Any]) -> None:
    """Give timelines the title that names each, and one axis of time, so that their lengths can be compared."""
    panels = {title: figure.axes[0] for title, figure in figures.items()}
    end = max(axes.get_xlim()[1] for axes in panels.values())
    for title, axes in panels.items():
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0, end)


def measure_all_reduce(
    comm: Communicator, algorithms: Sequence[str], sizes: Sequence[int], say: Callable[..., None]
) -> list[dict[str, Any]]:
    """Measure all-reduces of these sizes in bytes, in turns with MPI's own. Print and return the times."""
    rows = [measure(comm, "all_reduce", name, size) for name in algorithms for size in sizes]
    say("     bytes  algorithm                      ours   MPI's own    algbw   busbw (GB/s)")
    for row in rows:
        algbw = row["bytes"] / row["seconds"] / 1e9
        name = row["algorithm"] if row["algorithm"] == row["runs"] else f"{row['algorithm']}: {row['runs']}"
        ours, native = row["seconds"] * 1e6, row["mpi_seconds"] * 1e6
        busbw = algbw * 2 * (comm.size - 1) / comm.size
        say(f"{row['bytes']:10,}  {name:24} {ours:7.0f} us {native:8.0f} us  {algbw:7.3f}  {busbw:7.3f}")
    return rows
