"""A communicator whose channels move one message at a time, in the order of the calls, as NCCL's streams do."""

import time
from collections import deque

import numpy as np

from minipar.errors import CommunicationError


class OneAtATime:
    """The sends and receives of `comm`, of which a channel begins one when the one before it is done.

    `channel` is what has a channel: "rank", "pair" or "direction". With `tags=False` all messages have the same tag, as
    over NCCL, where a message has no name and only its place counts. A rank moves its messages while it waits.
    """

    def __init__(self, comm, channel, tags=True):
        self.comm, self.channel, self.tags = comm, channel, tags
        self.rank, self.size, self.traffic = comm.rank, comm.size, comm.traffic
        self.queues = {}

    def isend(self, array, peer, tag=0):
        return self.post(self.comm.isend, "to", array, peer, tag)

    def irecv(self, array, peer, tag=0):
        return self.post(self.comm.irecv, "from", array, peer, tag)

    def post(self, move, way, array, peer, tag):
        key = {"rank": None, "pair": peer, "direction": (way, peer)}[self.channel]
        queue = self.queues.setdefault(key, deque())
        queue.append(Posted(self, queue, move, (array, peer, tag if self.tags else 0)))
        return queue[-1]

    def progress(self):
        """Begin the first message of each channel, and those after it as long as each is done at once."""
        for queue in self.queues.values():
            while queue and queue[0].begin().test():
                queue.popleft()


class Posted:
    """A message in its channel."""

    def __init__(self, mover, queue, move, arguments):
        self.mover, self.queue, self.move, self.arguments = mover, queue, move, arguments
        self.work = None

    def begin(self):
        if self.work is None:
            self.work = self.move(*self.arguments)
        return self.work

    def test(self):
        return self not in self.queue

    def wait(self):
        engine = self.mover.comm.engine
        start, attempt = time.monotonic(), 0
        while True:
            self.mover.progress()
            if self.test():
                return self.work.wait()
            waiting_for = self.queue[0].work.missing
            self.mover.comm.transport.pause(
                attempt, waiting_for
            )  # between threads this sees at once that every rank waits
            attempt += 1
            if time.monotonic() - start > engine.timeout:
                raise CommunicationError(f"{waiting_for.describe()}: nothing for {engine.timeout:g} s")


def walk(mover, mine, elements=1):
    """Send and receive as this rank's list says. A computation only waits for what it uses."""
    received = {}
    for action in mine.ranks[mover.rank]:
        if action.computes:
            for half in action.halves:
                way = {"F": "F", "B": "B", "I": "B", "W": None}[half.kind]
                if (half.stage, way, half.microbatch) in received:
                    received[half.stage, way, half.microbatch].wait()
            continue
        other = action.other_end.stage
        verb, way = action.kind.split("_")
        tag = 100 * min(action.stage, other) + 10 * (way == "B") + action.microbatch
        array = np.zeros(elements)
        if verb == "RECV":
            received[action.stage, way, action.microbatch] = mover.irecv(array, mine.home[other], tag)
        else:
            mover.isend(array, mine.home[other], tag)
    for queue in mover.queues.values():
        while queue:
            queue[-1].wait()
