"""Claims about the lists of chapters 7 and 8: their idle time is the library's, their gradients one device's."""

import numpy as np
import pytest

from chapters.support.pipeline_runs import gradients_on_one_device
from chapters.support.schedule_lists import idle, library_lists, run_list
from minipar.comm import run_local
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zbv"])
def test_idle_is_the_librarys(name):
    line = simulate(make(name, 4, 8), Durations(4, 5, 3))
    assert idle(library_lists(name, 4, 8), {"F": 4, "I": 5, "W": 3, "B": 8}) == line.makespan * line.bubble_fraction


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_a_list_on_the_ranks_gives_one_devices_gradients(name):
    weights, batch = np.random.default_rng(0).normal(size=(3, 4, 4)), np.random.default_rng(1).normal(size=(5, 2, 4))
    found = run_local(3, run_list, library_lists(name, 3, 5), weights, batch)
    assert np.array_equal(found, gradients_on_one_device(weights, batch))


def test_gradients_on_one_device_are_those_of_small_differences():
    weights, batch = np.random.default_rng(0).normal(size=(2, 3, 3)), np.random.default_rng(1).normal(size=(2, 4, 3))

    def loss(change):
        y = batch
        for weight in weights + change:
            y = np.tanh(y @ weight)
        return (y**2).sum() / 2

    change = np.zeros_like(weights)
    change[0, 1, 2] = 1e-6
    slope = (loss(change) - loss(-change)) / 2e-6
    assert gradients_on_one_device(weights, batch)[0, 1, 2] == pytest.approx(slope, rel=1e-6)
