"""Many ranks in one thread: for simulations of communication alone.

A collective is a generator, so a loop can take turns between hundreds of ranks, where as many threads would spend their
time on waking each other. Only asynchronous operations can run this way: nobody may wait before all have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minipar.comm.clock import Clock, Network
from minipar.comm.communicator import Communicator
from minipar.comm.engine import Work
from minipar.comm.local import LocalTransport, LocalWorld
from minipar.errors import CommunicationError


class OneThread:
    """All ranks of a world. `ranks[r]` is rank r's communicator, with a clock of its own that `clock()` makes."""

    def __init__(self, size: int, clock: Callable[[], Clock], network: Network | None = None) -> None:
        self._world = LocalWorld(size)
        self.ranks = [
            Communicator(LocalTransport(self._world, range(size), rank), clock=clock(), network=network)
            for rank in range(size)
        ]

    def take_turns(self, works: Iterable[Work]) -> float:
        """Advance the work of all ranks until everything is done; each rank's clock then stands where its own ends.
        Returns the latest. CommunicationError if no message can come any more: some rank has not begun.
        """
        works = list(works)
        left, delivered = works, -1
        while left and self._world.delivered > delivered:
            delivered = self._world.delivered
            left = [work for work in left if not work.test()]
        if left:
            raise CommunicationError(f"no message is on its way: {left[0].describe()}")
        for work in works:
            work.wait()
        return max(comm.clock.now() for comm in self.ranks)
