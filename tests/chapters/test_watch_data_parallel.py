"""The instruments of the chapter on data parallelism: each objects to what it is for, and to nothing else."""

import numpy as np
import pytest

from chapters.support.ch04 import watch
from minipar.comm import run_local


def test_one_bucket_costs_what_the_naive_step_costs():
    naive, one, many = watch.simulate([2**30, 2**17]).steps
    assert (naive.bucket_bytes, one.buckets, many.buckets) == (None, 1, 7)
    assert one.seconds == pytest.approx(naive.seconds, abs=1e-12)
    exposed = watch.all_reduce_seconds(watch.ELEMENTS, watch.DEVICES)
    assert naive.seconds == pytest.approx(watch.COMPUTATION + exposed, abs=1e-12)
    assert watch.COMPUTATION < many.seconds < naive.seconds


def examined(parameters=0.0, losses=(4.0, 3.0), messages=1):
    """What each of two ranks sees of a run that is right but for what is given; rank 1's may differ."""

    def examine(comm):
        def train():
            for _ in range(messages):
                comm.all_reduce(np.zeros(2), algorithm="ordered")
            return np.ones(3) + np.ravel(parameters)[-comm.rank], losses

        return watch.examine(comm, train, np.ones(3), 3.0, nbytes=16)

    first, second = run_local(2, examine)
    assert first == second
    return first.caught


def test_each_instrument_objects_to_its_own_mistake():
    assert examined() == set()
    assert examined(losses=(4.0, 3.2)) == {"loss"}
    assert examined(messages=2) == {"bytes"}
    assert examined(parameters=1e-15) == {"one device"}
    assert examined(parameters=(0.0, 1e-9)) == {"ranks", "one device"}
