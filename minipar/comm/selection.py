"""Which algorithm "auto" means: the one place where it is decided."""

from __future__ import annotations

from minipar.errors import UsageError

ALGORITHMS = {
    "all_reduce": ("ring", "recursive_doubling", "recursive_halving", "ordered", "mpi"),
    "reduce_scatter": ("ring", "recursive_halving", "ordered", "mpi"),
    "all_gather": ("ring", "recursive_doubling", "pairwise", "mpi"),
    "all_to_all": ("pairwise", "mpi"),
    "broadcast": ("binomial", "mpi"),
    "barrier": ("dissemination", "mpi"),
}

FEW_STEPS_BELOW = 256 * 1024  # bytes of the whole array

SMALL = {"all_reduce": "recursive_doubling", "reduce_scatter": "recursive_halving", "all_gather": "recursive_doubling"}
LARGE = {
    "all_reduce": "ordered",
    "reduce_scatter": "ordered",
    "all_gather": "pairwise",
    "all_to_all": "pairwise",
    "broadcast": "binomial",
    "barrier": "dissemination",
}


def choose(op: str, algorithm: str, nbytes: int) -> str:
    """The algorithm to run. UsageError for a name that the operation does not have.

    "auto", for an array of `nbytes` bytes in all:
      below FEW_STEPS_BELOW, where the time per message counts: lg p messages (recursive doubling or halving);
      from there on, where the time per byte counts: the fewest bytes, n(p-1)/p each way, and as few rounds of waiting
      as can be: pairwise, everything posted at once ("ordered" for sums, whose order it keeps for nothing).
    An explicit name is obeyed at any size: that DP and ZeRO agree bit for bit rests on "ring" always being the ring.
    """
    if algorithm == "auto":
        return SMALL[op] if op in SMALL and nbytes < FEW_STEPS_BELOW else LARGE[op]
    if algorithm not in ALGORITHMS[op]:
        raise UsageError(f'{op}: algorithm "{algorithm}": expected auto, {", ".join(ALGORITHMS[op])}')
    return algorithm
