"""The record of all ranks as Chrome trace JSON, for Perfetto and chrome://tracing; trace.py says what is drawn."""

import json
from typing import Any

from minipar.comm.clock import WallClock


def start_trace(comm: Any) -> None:  # a Communicator
    """Forget all events and record from now on.

    All ranks call it. Wall clocks of all ranks are set to 0 together.
    """
    comm.barrier()
    if isinstance(comm.clock, WallClock):
        comm.barrier()  # the second time every rank is awake and leaves it at nearly the same moment
        comm.clock.align()
    comm.tracer.events.clear()
    comm.tracer.enabled = True


def chrome_events(comm: Any) -> list[dict[str, Any]]:
    """Return this rank's events, with the names of its process and of its tracks."""
    rank = comm.ranks[comm.rank]
    metadata: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
    ]
    for tid, name in comm.tracer.tracks.values():
        metadata.append(("thread_name", tid, {"name": name}))
    names = [{"name": name, "ph": "M", "tid": tid, "args": args} for name, tid, args in metadata]
    return [event | {"pid": rank} for event in names + comm.tracer.events]


def save_chrome_trace(path: str, comm: Any, mesh: Any = None) -> None:
    """Stop recording and write all ranks' events to `path` as {"traceEvents": [...]} on rank 0.

    All ranks call it.

    otherData names the clock and, if it is given, the mesh: {"pp": PP, "dp": DP, "tp": TP}, the
    slowest axis first.
    """
    comm.tracer.enabled = False
    everyone = comm.all_gather_bytes(json.dumps(chrome_events(comm)).encode())
    if comm.rank > 0:
        return
    events = [event for data in everyone for event in json.loads(data)]
    about: dict[str, object] = {"clock": comm.clock.name}
    if mesh is not None:
        about["mesh"] = {axis: mesh.shape[axis] for axis in reversed(mesh.AXES)}
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "otherData": about}, file)
