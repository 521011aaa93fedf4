"""Claims about what chapter 9 runs on eight ranks."""

import os
from unittest.mock import patch

import pytest

from chapters.support.ch09 import eight
from minipar.comm import DeviceMesh, run_local, serial
from minipar.train.trainer import Trainer


def test_any_number_of_ranks_has_a_layout():
    for size in range(1, 17):
        config = eight.config_of(eight.layout_of(size), size)
        assert config.mesh.dp * config.mesh.tp * config.mesh.pp == size
    assert "--dp 2 --tp 2 --pp 2" in eight.layout_of(8)


def test_eight_threads_answer_where_there_is_one_rank():
    assert eight.on_eight(serial(), lambda comm, factor: comm.rank * factor, 3) == [0, 3, 6, 9, 12, 15, 18, 21]


def test_a_message_is_priced_by_the_axis_of_its_ranks():
    network = eight.AxisNetwork(slow="dp", link="Ethernet")
    nbytes = 1000
    assert eight.real_bytes(nbytes) == 1000 * 4096 / 2
    assert network.seconds(nbytes, 0, 2) == pytest.approx(30e-6 + eight.real_bytes(nbytes) / 12.5e9)
    assert network.seconds(nbytes, 3, 2) == network.seconds(nbytes, 4, 0) == pytest.approx(3e-6 + 2048e3 / 450e9)


@pytest.mark.long
def test_ranks_share_the_jobs_and_all_have_the_timings():
    jobs = [eight.Job(None, "NVLink", 2), eight.Job("tp", "Ethernet", 2), eight.Job("pp", "Ethernet", 2, traced=True)]
    alone = eight.simulate(serial(), jobs)
    shared, other = run_local(2, eight.simulate, jobs)
    assert list(shared) == list(alone) == jobs and other == shared
    for job in jobs:
        assert (shared[job].seconds, shared[job].traffic) == (alone[job].seconds, alone[job].traffic)
    seconds = [timing.seconds for timing in alone.values()]
    assert seconds[0] < seconds[2] < seconds[1]
    assert [bool(timing.events) for timing in alone.values()] == [False, False, True]


def test_traces_are_joined_one_after_another():
    steps = [
        eight.Timing(seconds, {}, [{"pid": rank, "ph": "X", "ts": 5.0} for rank in range(8)])
        for seconds in (2e-6, 1e-6)
    ]
    events = eight.one_after_another(steps, ranks=(0, 4))["traceEvents"]
    assert [(event["pid"], event["ts"]) for event in events] == [(0, 5.0), (4, 5.0), (0, 7.0), (4, 7.0)]


def test_a_shared_directory_is_known_to_all_and_removed():
    names = run_local(3, use_directory)
    assert len(set(names)) == 1 and not os.path.exists(names[0])


def use_directory(comm):
    name, cleanup = eight.shared_directory(comm)
    assert os.path.isdir(name)
    comm.barrier()
    cleanup.close()
    comm.barrier()
    return name


class DealsByWorldRank(Trainer):
    """A mistake: samples by the rank in the world."""

    def samples(self, replica, microbatch):
        return super().samples(self.mesh.world.rank % self.config.mesh.dp, microbatch)


def test_the_instruments_notice_a_mistake_and_only_that():
    single = eight.single_device("--global-batch 4", 2)
    right = run_local(8, eight.examine, Trainer, DeviceMesh, single)
    assert right == [[]] * 8
    with patch("minipar.parallel.tensor.layers.check_same_tokens"):  # it would refuse this mistake
        wrong = run_local(8, eight.examine, DealsByWorldRank, DeviceMesh, single)
    assert set(wrong[0]) == {"ranks", "one device"} and all(set(answer) <= {"ranks"} for answer in wrong[1:])
