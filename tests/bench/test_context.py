"""Claims about `bench context`: what counts as computing and as waiting, on clocks that the test moves."""

import json
import threading
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from minipar.bench import context
from minipar.comm import run_local, serial
from minipar.errors import UsageError

CLOCKS = threading.local()


class SteadyClock(context.WaitingClock):
    """A waiting clock on which time passes only when the test says so."""

    ticks = staticmethod(lambda: 0.0)

    def __init__(self):
        super().__init__()
        CLOCKS.own = self

    def compute(self, seconds):
        self._time += seconds


def test_a_clock_counts_each_wait_once():
    """Where one call takes up several messages, each counts only for what it adds to the one before."""
    clock = SteadyClock()
    assert clock.waited == 0.0
    clock.compute(10.0)
    assert clock.now() == 10.0
    clock.resume(11.0)
    clock.resume(13.0)
    assert (clock.waited, clock.now()) == (3.0, 13.0)


def backward(factor):
    return SimpleNamespace(data=np.zeros(2), backward=lambda gradient: CLOCKS.own.compute(0.5 * factor))


def test_a_row_has_the_part_of_the_time_that_ranks_compute(monkeypatch, capsys):
    """Rank r of 3 computes for 1 + r seconds, or twice that, and waits for the last; backward takes half a second.

    The second run is three times as slow. One rank alone takes 8 + r seconds for the whole sequence.
    """

    def slower(order):
        again = order in CLOCKS.ran
        CLOCKS.ran.add(order)
        return 3.0 if again else 1.0

    def ring_attention(ring, x, heads):
        comm, order = ring.context.comm, ring.context.order
        assert x.requires_grad and x.data.shape == (1, 4, 3 * 64) and comm.clock is CLOCKS.own
        factor = slower(order)
        CLOCKS.own.compute(factor * (1 + comm.rank) * (2 if order == "contiguous" else 1))
        comm.barrier()
        return backward(factor)

    def whole_attention(x, heads, method):
        assert x.requires_grad and x.data.shape == (1, 12, 3 * 64) and method == "blockwise"
        factor = slower("one")
        CLOCKS.own.compute(factor * (8 + CLOCKS.rank))
        return backward(factor)

    def rank(comm):
        CLOCKS.rank, CLOCKS.ran = comm.rank, set()
        context.run(comm, Namespace(seq_len=12, heads=1, repeat=2, json="-"))

    monkeypatch.setattr(context, "WaitingClock", SteadyClock)
    monkeypatch.setattr(context, "block_attention", ring_attention)
    monkeypatch.setattr(context, "causal_attention", whole_attention)
    run_local(3, rank)
    assert json.loads(capsys.readouterr().out) == [
        {
            "order": order,
            "ranks": 3,
            "seq_len": 12,
            "seconds": pytest.approx(2 * slowest),
            "efficiency": pytest.approx(computed / slowest),
            "published": pytest.approx(published),
            "of_one": pytest.approx(10.5 / slowest / 3),
        }
        for order, slowest, computed, published in (("zigzag", 3.5, 2.5, 1.0), ("contiguous", 6.5, 4.5, 13 / 21))
    ]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"heads": 0}, "--seq-len 12 --heads 0 --repeat 1: expected at least 1 of each"),
        ({"repeat": 0}, "--seq-len 12 --heads 1 --repeat 0: expected at least 1 of each"),
        ({"seq_len": 0}, "--seq-len 0 --heads 1 --repeat 1: expected at least 1 of each"),
        ({"seq_len": 10}, ".*10"),
    ],
)
def test_what_context_cannot_divide_is_refused(changed, line):
    args = Namespace(**{"seq_len": 12, "heads": 1, "repeat": 1, "json": None} | changed)
    with pytest.raises(UsageError, match=f"^{line}"):
        run_local(2, context.run, args)


def test_context_needs_two_ranks():
    with pytest.raises(UsageError, match="^bench context needs at least 2 ranks: mpirun -n 4 python -m minipar.bench"):
        context.run(serial(), Namespace(seq_len=12, heads=1, repeat=1, json=None))
