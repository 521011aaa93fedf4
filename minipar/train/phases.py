"""The phases of a step, for the trace and the memory ledger, and the time of its matrix products."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from minipar import memory
from minipar.autograd import flop_counter
from minipar.comm.clock import ModelClock
from minipar.comm.communicator import Communicator


def start_step() -> None:
    """Start the first phase of a step in the memory ledger."""
    memory.enter("forward", restart=True)


@contextmanager
def phase(comm: Communicator, name: str) -> Iterator[None]:
    """Record the block as a phase of the step, in the trace and in the memory ledger."""
    memory.enter(name)
    with comm.tracer.region(name):
        yield


def model_clock(comm: Communicator) -> AbstractContextManager[object]:
    """Advance a model clock by each matrix product's operations / its speed.

    All else takes no time on it.
    """
    clock = comm.clock
    if not isinstance(clock, ModelClock):
        return nullcontext()

    def advance(flops: int) -> None:
        clock.advance(flops / clock.flops_per_second)

    return flop_counter(advance)
