"""Claims about communicators of gradients: each hands its arguments on, and holds no more than its copies."""

import numpy as np
import pytest
from training import Done

from minipar.comm import run_local, serial
from minipar.memory import MemoryLedger
from minipar.parallel.hybrid import CastingComm, HybridComm, in_dtype, over_shards


class Noting:
    """A communicator of two ranks that notes each operation, and does nothing."""

    rank, size = 1, 2

    def __init__(self, name, notes):
        self.name = name
        self.notes = notes

    def levels(self, replicas):
        self.notes.append(("levels", replicas))
        return Noting("inside", self.notes), Noting("across", self.notes)

    def note(self, operation, x, out=None, **options):
        self.notes.append((self.name, operation, x.dtype.name, None if out is None else out.dtype.name, options))
        return Started()

    def all_reduce(self, x, **options):
        return self.note("all_reduce", x, **options)

    def reduce_scatter(self, x, **options):
        return self.note("reduce_scatter", x, **options)

    def all_gather(self, x, **options):
        return self.note("all_gather", x, **options)


class Started(Done):
    """An operation that ends at once."""

    def then(self, call):
        call()


ORDERED = {"algorithm": "ordered", "async_op": True}


def test_a_replica_hands_every_argument_on():
    notes = []
    hybrid = HybridComm(Noting("all", notes), 3)
    x, out = np.zeros(4), np.zeros(2)
    hybrid.all_reduce(x, **ORDERED)
    hybrid.all_reduce(x, algorithm="ordered")
    hybrid.reduce_scatter(x, out=out, **ORDERED).wait()
    hybrid.all_gather(out, out=x, **ORDERED)
    assert (hybrid.rank, hybrid.size) == (1, 2)
    assert notes == [
        ("levels", 3),
        ("inside", "all_reduce", "float64", None, ORDERED),
        ("inside", "all_reduce", "float64", None, {"algorithm": "ordered", "async_op": False}),
        ("inside", "reduce_scatter", "float64", "float64", ORDERED),
        ("across", "all_reduce", "float64", None, ORDERED),
        ("inside", "all_gather", "float64", "float64", ORDERED),
    ]


def test_sums_in_another_dtype_hand_every_argument_on():
    """Gathered parameters keep their dtype."""
    notes = []
    casting = CastingComm(Noting("all", notes), "float32")
    x, out = np.zeros(4), np.zeros(2)
    casting.all_reduce(x, **ORDERED)
    casting.reduce_scatter(x, out=out, **ORDERED)
    casting.all_gather(out, out=x, **ORDERED)
    assert (casting.rank, casting.size) == (1, 2)
    assert notes == [
        ("all", "all_reduce", "float32", None, ORDERED),
        ("all", "reduce_scatter", "float32", "float32", ORDERED),
        ("all", "all_gather", "float64", "float64", ORDERED),
    ]


def test_a_sum_in_another_dtype_is_cast_back():
    def rank(comm):
        casting = CastingComm(comm, "float32")
        x = np.array([1.0, 1 + 2.0**-40])
        whole = casting.all_reduce(x, **ORDERED).wait()
        own = casting.reduce_scatter(np.array([1.0, 2.0 + 2.0**-40]), out=np.empty(1), **ORDERED).wait()
        return whole is x, x.dtype.name, x.tolist(), own.dtype.name, own.tolist()

    expected = [[2.0], [4.0]]
    assert run_local(2, rank) == [(True, "float64", [2.0, 2.0], "float64", own) for own in expected]


def test_the_copies_that_travel_are_in_the_ledger():
    """They are copies of all gradients until they are summed, or of one bucket and of this rank's chunk of it."""

    class Looks(Noting):
        """It notes what the ledger holds at the start of an operation."""

        def note(self, operation, x, out=None, **options):
            held = {kind: nbytes for kind, nbytes in ledger.held.items() if nbytes}
            self.notes.append((operation, held))

    ledger = MemoryLedger()
    notes = []
    casting = CastingComm(Looks("all", notes), "float32")
    with ledger.recording():
        casting.all_reduce(np.zeros(6), **ORDERED)
        casting.reduce_scatter(np.zeros(6), out=np.zeros(3), **ORDERED)
    assert notes == [("all_reduce", {"gradients": 6 * 4}), ("reduce_scatter", {"buffers": 6 * 4 + 3 * 4})]


@pytest.mark.parametrize(("dtype", "casts"), [(None, False), ("float64", False), ("float32", True)])
def test_only_another_dtype_needs_copies(dtype, casts):
    comm = serial()
    found = in_dtype(comm, dtype, "float64")
    assert isinstance(found, CastingComm) == casts and (casts or found is comm)


def test_one_replica_has_all_ranks():
    comm = serial()
    assert over_shards(comm, 1) is comm
