"""What moves is counted: every message and every byte that this rank sends, by operation and mesh axis."""

from __future__ import annotations


class Traffic:
    """One per rank, shared by all communicators split from it.

    Not counted: `algorithm="mpi"` (the library does not say what it sends) and the 8-byte clock headers.
    `all_gather_bytes` and what is built on it are counted under the operation "control".
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def counter(self, op: str, axis: str) -> list[int]:
        """The mutable [messages, bytes] of one operation on one axis."""
        key = (op, axis)
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = [0, 0]
        return found

    def messages(self, op: str | None = None, axis: str | None = None) -> int:
        """Messages sent; None stands for every operation, every axis."""
        return self._total(0, op, axis)

    def bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Bytes sent; None stands for every operation, every axis."""
        return self._total(1, op, axis)

    def _total(self, which: int, op: str | None, axis: str | None) -> int:
        return sum(count[which] for (o, a), count in self._counts.items() if op in (None, o) and axis in (None, a))

    def reset(self) -> None:
        """Start again from zero. (A collective under way finishes on the old account.)"""
        self._counts = {}

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """{axis: {op: {"messages": m, "bytes": b}}}, ready for JSON."""
        table: dict[str, dict[str, dict[str, int]]] = {}
        for (op, axis), (messages, nbytes) in self._counts.items():
            table.setdefault(axis, {})[op] = {"messages": messages, "bytes": nbytes}
        return table
