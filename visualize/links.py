"""What the ranks of a device mesh sent one another, added up from a trace: by axis, by rank and by pair of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from minipar.errors import UsageError
from visualize.timeline import Trace

AXES = ("tp", "dp", "pp")  # fastest first, as in minipar.comm.mesh


@dataclass(frozen=True)
class MeshTraffic:
    """What the ranks of a mesh sent one another over all steps of a trace.

    shape  {"pp": PP, "dp": DP, "tp": TP}; rank = (pp*DP + dp)*TP + tp
    steps  how many steps the trace has (1 if it marks none); what `per_step` divides by
    links  {(axis, source, dest): [messages, bytes]}, world ranks
    """

    shape: dict[str, int]
    steps: int
    links: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.shape.values())

    @property
    def axes(self) -> list[str]:
        """The axes that have more than one rank, fastest first."""
        return [axis for axis in AXES if self.shape[axis] > 1]

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"pp": ., "dp": ., "tp": .} of a world rank."""
        rest, tp = divmod(rank, self.shape["tp"])
        pp, dp = divmod(rest, self.shape["dp"])
        return {"pp": pp, "dp": dp, "tp": tp}

    def sent(self, axis: str, rank: int | None = None) -> tuple[int, int]:
        """(messages, bytes) sent on an axis, by one rank or by all."""
        counts = [count for (a, source, _), count in self.links.items() if a == axis and rank in (None, source)]
        return sum(messages for messages, _ in counts), sum(nbytes for _, nbytes in counts)

    def pairs(self, axis: str) -> Iterator[tuple[int, int, int, int]]:
        """(rank, higher rank, bytes up, bytes down) of all who talk on an axis."""
        for low, high in sorted({(min(s, d), max(s, d)) for a, s, d in self.links if a == axis}):
            up, down = (self.links.get((axis, *pair), [0, 0])[1] for pair in ((low, high), (high, low)))
            yield low, high, up, down

    def per_step(self, total: int) -> int | float:
        """A total over all steps for one of them: their mean, an int where it is whole."""
        mean = Fraction(total, self.steps)
        return int(mean) if mean.denominator == 1 else float(mean)


def mesh_traffic(trace: Trace, name: str = "the trace") -> MeshTraffic:
    """Add up a trace's messages. UsageError if it does not say its mesh, or if a message does not fit the mesh."""
    old = "written by an older minipar? Trace again"
    if set(trace.mesh) != set(AXES) or any(size < 1 for size in trace.mesh.values()):
        raise UsageError(f"{name} does not say its mesh: not of minipar.train --trace, or {old}")
    traffic = MeshTraffic({axis: trace.mesh[axis] for axis in ("pp", "dp", "tp")}, max(1, len(trace.steps())))
    product = f"pp*dp*tp = {'*'.join(map(str, traffic.shape.values()))} = {traffic.ranks}"
    if list(trace.ranks) != list(range(traffic.ranks)):
        raise UsageError(f"{name} has {len(trace.ranks)} ranks, but its mesh {product}")
    for message in (message for message in trace.messages if message.axis in AXES):
        if message.nbytes is None:
            raise UsageError(f"{name} does not say how many bytes its messages have: {old}")
        source, dest = traffic.coordinates(message.source), traffic.coordinates(message.dest)
        if [axis for axis in source if source[axis] != dest[axis]] != [message.axis]:
            raise UsageError(
                f"{name} has a message on {message.axis} from rank {message.source} to rank {message.dest}, which do "
                f"not lie along {message.axis} in a mesh {product}"
            )
        count = traffic.links.setdefault((message.axis, message.source, message.dest), [0, 0])
        count[0] += 1
        count[1] += message.nbytes
    return traffic


def mesh_numbers(traffic: MeshTraffic) -> dict[str, Any]:
    """For JSON: bytes and messages over all steps, by axis, by rank and axis, and by pair of ranks and axis."""

    def counts(axis: str, rank: int | None = None) -> dict[str, int]:
        return dict(zip(("messages", "bytes"), traffic.sent(axis, rank), strict=True))

    return {
        "mesh": traffic.shape,
        "steps": traffic.steps,
        "axes": {axis: counts(axis) | {"bytes_per_step": traffic.per_step(counts(axis)["bytes"])} for axis in AXES},
        "ranks": [
            {"rank": rank} | traffic.coordinates(rank) | {"sent": {axis: counts(axis, rank) for axis in AXES}}
            for rank in range(traffic.ranks)
        ],
        "links": [
            {"axis": axis, "source": source, "dest": dest, "messages": messages, "bytes": nbytes}
            for (axis, source, dest), (messages, nbytes) in sorted(traffic.links.items())
        ],
    }
