"""A small trace, metrics and benchmark rows, which the tests of visualize draw."""


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
