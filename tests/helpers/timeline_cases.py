"""A program that uses every collective on the model clock, and its trace as text.

`PYTHONPATH=tests/helpers python -m timeline_cases` writes tests/comm/recorded again: look at the difference before it
is committed.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from minipar.comm import DeviceMesh, Network, run_local, save_chrome_trace, start_trace
from minipar.comm.communicator import ALGORITHMS

RECORDED = Path(__file__).parents[1] / "comm" / "recorded"
NETWORK = Network(1e-5, 1e-9, Network(4e-5, 5e-9), 4)  # hosts of four ranks


def call(comm, op: str, algorithm: str, n: int, **options) -> Any:
    """Run one collective on n elements, of which each rank's differ."""
    x = np.arange(n, dtype=np.float32) + comm.rank
    own = np.array_split(x, comm.size)[comm.rank].copy()
    operations = {
        "all_reduce": lambda: comm.all_reduce(x, algorithm=algorithm, **options),
        "reduce_scatter": lambda: comm.reduce_scatter(x, own, algorithm=algorithm, **options),
        "all_gather": lambda: comm.all_gather(own, x, algorithm=algorithm, **options),
        "all_to_all": lambda: comm.all_to_all(x, np.empty(own.size * comm.size, x.dtype), algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(x, 1, algorithm=algorithm),
        "barrier": lambda: comm.barrier(algorithm=algorithm),
    }
    return operations[op]()


def collectives(comm, path: str) -> dict:
    """Every algorithm once; what this rank has counted."""
    start_trace(comm)
    comm.traffic.reset()
    for op, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            call(comm, op, algorithm, 1001)
    counted = {key: list(counts) for key, counts in comm.traffic.counts.items()}
    save_chrome_trace(path, comm)
    return counted


def overlap(comm, path: str) -> dict:
    """Collectives of two axes behind computation, and single messages between stages."""
    mesh = DeviceMesh(comm, pp=2, dp=2, tp=2)
    start_trace(comm)
    comm.traffic.reset()
    for step in range(2):
        with comm.tracer.region("forward", flops=1e8 * (1 + comm.rank)):
            mesh.tp.all_reduce(np.ones(500))
        works = [call(mesh.dp, "all_reduce", "ring", 3000, async_op=True) for _ in range(2)]
        if mesh.pp.rank == 0:
            mesh.pp.isend(np.ones(50), 1, tag=step).wait()
        with comm.tracer.region("backward", flops=3e7):
            pass
        if mesh.pp.rank == 1:
            mesh.pp.irecv(np.ones(50), 0, tag=step).wait()
        for work in works:
            work.wait()
    counted = {key: list(counts) for key, counts in comm.traffic.counts.items()}
    save_chrome_trace(path, comm, mesh)
    return counted


def as_text(program, ranks: int) -> str:
    """Write a line for each event of the trace, with times of seven digits, and for each rank's counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        counted = run_local(ranks, program, path, clock="model", network=NETWORK)
        trace = json.loads(Path(path).read_text())
    lines = [json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})]
    for event in sorted(trace["traceEvents"], key=lambda event: (event["pid"], event.get("ts", -1.0), str(event))):
        for key in ("ts", "dur"):
            if key in event:
                event[key] = float(f"{event[key]:.7g}")
        if "wait" in event.get("args", {}):
            event["args"]["wait"] = float(f"{event['args']['wait']:.7g}")
        lines.append(" ".join(f"{key}={value}" for key, value in sorted(event.items()) if key not in ("cat", "bp")))
    lines += [f"rank {rank}: {op} {axis}: {n}" for rank, own in enumerate(counted) for (op, axis), n in own.items()]
    return "\n".join(lines) + "\n"


PROGRAMS = {"collectives_of_4": (collectives, 4), "collectives_of_5": (collectives, 5), "overlap": (overlap, 8)}


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name, (program, ranks) in PROGRAMS.items():
        (RECORDED / f"{name}.txt").write_text(as_text(program, ranks), encoding="utf-8")
