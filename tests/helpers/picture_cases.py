"""A small trace, metrics, benchmark rows, a search and schedules, which the tests of visualize draw."""

from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from visualize.plan import MEMORY, TIME


def slice_event(name, rank, tid, start, length, **args):
    return {"ph": "X", "name": name, "pid": rank, "tid": tid, "ts": start * 1e6, "dur": length * 1e6, "args": args}


def chrome(ranks=3, steps=3) -> dict:
    """A hand-made trace of steps of 10 s: forward 2, backward 4, all_reduce 3 (1 of it waiting), optimizer 1."""
    events = []
    for r in range(ranks):
        for tid, name in ((0, "computation"), (1, "communication dp")):
            events.append({"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": {"name": name}})
        for s in range(steps):
            at = 10.0 * s
            events.append(slice_event("optimizer", r, 0, at + 9, 1))  # the order in the file does not matter
            events.append(slice_event("forward", r, 0, at, 2))
            events.append(slice_event("backward", r, 0, at + 2, 4))
            events.append(slice_event("all_reduce", r, 1, at + 6, 3, op="all_reduce", bytes=8, wait=1.0))
            message = {"name": "message", "id": f"{s}{r}", "tid": 1}
            events.append(message | {"ph": "s", "pid": r, "ts": (at + 6) * 1e6, "args": {"bytes": 8}})
            events.append(message | {"ph": "f", "bp": "e", "pid": (r + 1) % ranks, "ts": (at + 9) * 1e6})
    return {"traceEvents": events, "otherData": {"clock": "model"}}


def rows(losses):
    return [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses)]


def bench_rows():
    common = {"op": "all_reduce", "ranks": 4, "ratio": 1.0, "runs": "ring"}
    ring = [
        common | {"algorithm": "ring", "bytes": n, "seconds": n * 1e-9, "mpi_seconds": n * 2e-9}
        | {"wire_bytes": n * 3 // 2, "wire_bytes_expected": n * 3 // 2}
        for n in (4096, 1024)
    ]  # fmt: skip
    mpi = ring[0] | {"algorithm": "mpi", "mpi_seconds": None, "wire_bytes": None, "wire_bytes_expected": None}
    return [*ring, mpi, ring[0] | {"op": "barrier", "bytes": 0}]


def search():
    """Make what the planner writes, as far as it is drawn: two plans of three meshes."""
    plans = []
    for dp, tp, seconds in ((4, 1, 100.0), (2, 2, 101.0)):
        sizes = {"dp": dp, "tp": tp, "pp": 1, "zero_stage": 1, "mfu": 0.5}
        times = dict.fromkeys(TIME, seconds / 6) | {"total": seconds}
        plans.append(sizes | {"seconds": times, "memory_bytes": dict.fromkeys(MEMORY, 10e9)})
    meshes = [plan | {"seconds": plan["seconds"]["total"], "memory_bytes": 50e9 + plan["tp"] * 1e9} for plan in plans]
    meshes.append({"dp": 1, "tp": 4, "pp": 1, "seconds": 104.0, "memory_bytes": 55e9})
    about = {"model": {"name": "m"}, "gpus": 4, "gpu": {"name": "g", "memory": 60e9}, "global_batch": 8, "seq_len": 16}
    return about | {"plans": plans, "meshes": meshes, "assumptions": {"memory_used": 0.92}}


def timeline(name="1f1b", p=4, m=8, v=None, **durations):
    """Simulate a schedule of p ranks and m microbatches."""
    return simulate(make(name, p, m, v), Durations(**durations))
