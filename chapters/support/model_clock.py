"""Run programs of chapters 3, 4 and 7 on simulated ranks: threads, on the model clock, under a trace."""

from collections.abc import Callable
from typing import Any

from minipar.comm import Communicator, Network, chrome_events, run_local
from minipar.comm.clock import Clock


def traced(
    ranks: int,
    program: Callable[..., Any],
    *arguments: Any,
    network: Network | None = None,
    clock: str | Callable[[], Clock] = "model",
) -> tuple[list[Any], Any]:
    """Run program(comm, *arguments) on so many ranks. Return each rank's value, and the trace of all of them.

    No barrier comes first, as start_trace's would, so that the trace begins at 0.
    """
    from visualize import parse_trace  # it imports matplotlib, which only the rank that draws needs

    def run(comm: Communicator) -> tuple[Any, list[dict[str, Any]]]:
        comm.tracer.enabled = True
        value = program(comm, *arguments)
        return value, chrome_events(comm)

    results = run_local(ranks, run, clock=clock, network=network)
    events = [event for _, own in results for event in own]
    trace = parse_trace({"traceEvents": events, "otherData": {"clock": "model"}})
    return [value for value, _ in results], trace
