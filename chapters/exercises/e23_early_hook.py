"""Exercise 23 (chapter 4): a hook that fires too early.

`Early` below sums gradients over the ranks in buckets, while backward runs. Its runs train, and their gradients are
wrong: in the models that it gets some parameters are used more than once. Examples are an embedding that is the output
head too, and a parameter of two recomputed blocks (chapter 2), whose backwards know nothing of each other.

1. Find it. `first_early` gets the log of one rank. It has ("gradient", name) for each contribution that arrived and
   ("send", bucket) for each bucket that left, in the order of time. Return the first bucket that left too early, and
   the parameter of that bucket whose contribution arrived first after that. None if no bucket left too early.
2. Mend it. `Mended` is told before each backward how many contributions each parameter will get on this rank: `uses`.
   It may be 0 (such as an expert that got no token here), and it may differ between ranks and between steps.

A bucket leaves in the call that makes it complete, `begin` or `contribution`. But buckets leave strictly in order: one
that is complete waits until all before it have left.

Graded on 1, 2 and 3 ranks, in two steps: logs; the sums of the gradients over uses and ranks; that each bucket leaves
once, in order, not too early, and not later than it could.
"""

import numpy as np

from minipar.comm import Communicator

Event = tuple[str, str | int]


class Early:
    """Buckets of gradients. It is wrong if a parameter is used more than once, or not at all."""

    def __init__(self, comm: Communicator, buckets: list[dict[str, int]]) -> None:
        """Make the buckets, each with the names of its parameters and their numbers of elements."""
        self.comm, self.buckets = comm, buckets
        self.flat = [np.zeros(sum(sizes.values())) for sizes in buckets]
        self.views: dict[str, np.ndarray] = {}  # of each parameter, its part of the flat array of its bucket
        self.bucket_of: dict[str, int] = {}
        for number, sizes in enumerate(buckets):
            ends = np.cumsum(list(sizes.values()))
            self.views.update(zip(sizes, np.split(self.flat[number], ends[:-1]), strict=True))
            self.bucket_of.update(dict.fromkeys(sizes, number))

    def begin(self, uses: dict[str, int]) -> None:
        """Start a step."""
        for flat in self.flat:
            flat[...] = 0
        self.missing = [set(sizes) for sizes in self.buckets]
        self.under_way: list = []

    def contribution(self, name: str, gradient: np.ndarray) -> None:
        """Add a contribution to a parameter's gradient. Backward calls this once for each use."""
        self.views[name] += gradient
        self.missing[self.bucket_of[name]].discard(name)
        self.send_complete()

    def send_complete(self) -> None:
        """Start the all-reduces of the buckets that are complete, in order."""
        while len(self.under_way) < len(self.flat) and not self.missing[len(self.under_way)]:
            self.under_way.append(self.comm.all_reduce(self.flat[len(self.under_way)], async_op=True))

    def finish(self) -> dict[str, np.ndarray]:
        """Wait for all buckets; return the sum of each parameter's gradients."""
        for work in self.under_way:
            work.wait()
        return self.views


def first_early(log: list[Event], buckets: list[dict[str, int]]) -> tuple[int, str] | None:
    """Return the first bucket that left too early, and the parameter that shows it."""
    raise NotImplementedError("your code")


class Mended(Early):
    """Buckets of gradients for parameters with any number of uses. Change what must be changed."""

    def begin(self, uses: dict[str, int]) -> None:
        """Start a step in which each parameter gets uses[name] contributions on this rank."""
        raise NotImplementedError("your code")

    def contribution(self, name: str, gradient: np.ndarray) -> None:
        """Add a contribution to a parameter's gradient."""
        raise NotImplementedError("your code")
