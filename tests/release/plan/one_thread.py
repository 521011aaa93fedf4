"""Run hundreds of ranks in one thread: simulations of communication alone."""

from collections.abc import Callable, Iterable

from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.threads import ThreadTransport, ThreadWorld
from minipar.comm.transport import Request
from minipar.comm.work import Work
from minipar.errors import CommunicationError


class OneThread:
    """All ranks of a world in one thread, for simulations of communication alone.

    A collective is a generator, so a loop can take turns between hundreds of ranks. As many threads would spend their
    time on waking each other. Only asynchronous operations can run this way, because all must begin before any waits.
    `ranks[r]` is the communicator of rank r, with a clock of its own that `clock()` makes.
    """

    def __init__(self, size: int, clock: Callable[[], Clock], network: Network | None = None) -> None:
        world = ThreadWorld(size)
        transports = [ThreadTransport(world, range(size), rank) for rank in range(size)]
        self.ranks = [Communicator(transport, clock=clock(), network=network) for transport in transports]

    def take_turns(self, works: Iterable[Work]) -> float:
        """Advance the work of all ranks until it is done, and each rank's clock to its end. Return the latest time.

        CommunicationError if no message can come any more because some rank has not begun.
        """
        works = list(works)
        left: list[Work] = works
        missing: list[Request | None] = []
        while left:
            before, missing = missing, [work.missing for work in left]
            if missing == before:
                first = next(request for request in missing if request is not None)
                raise CommunicationError(f"no message is on its way: {first.describe()}")
            left = [work for work in left if not work.test()]
        for work in works:
            work.wait()
        return max(comm.clock.now() for comm in self.ranks)
