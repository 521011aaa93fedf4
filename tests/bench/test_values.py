"""Claims about the values in a benchmark's rows, with clocks and messages that the tests make."""

import itertools
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from minipar.bench import largest, layouts, machine, pipeline, step
from minipar.bench.costs import BLOCK, BLOCKS, SUMS, Shape
from minipar.comm import run_local, serial
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from minipar.train.config import DataConfig, ModelConfig, TrainConfig


def test_the_largest_value_is_one_ranks():
    assert run_local(3, lambda comm: largest(comm, 1.0 + comm.rank)) == [3.0] * 3


def test_a_message_takes_half_a_round_trip(monkeypatch):
    def ping_pong(comm, buffer, peer):
        return 2 * machine.ROUND_TRIPS * (1e-5 + 2e-9 * buffer.nbytes)

    monkeypatch.setattr(machine, "_ping_pong", ping_pong)
    for network, rows in run_local(3, machine.measure_messages):
        assert (network.alpha, network.beta) == (pytest.approx(1e-5), pytest.approx(2e-9))
        assert [row["seconds"] for row in rows] == pytest.approx([1e-5 + 2e-9 * row["bytes"] for row in rows])


def test_the_times_of_blocks_are_those_of_one_block(monkeypatch):
    """On a clock that stands still between the pieces, each of which takes 12 s."""
    ticks = itertools.count(0.0, 12.0)
    monkeypatch.setattr(machine, "time", SimpleNamespace(thread_time=lambda: next(ticks)))
    seconds = machine.pieces(Shape(16, 2, 8, 1), 1)
    del seconds["parameters"]
    assert seconds == {piece: 12.0 / (BLOCKS if piece in (*BLOCK, *SUMS) else 1) for piece in seconds}


def test_a_step_takes_from_a_common_start_to_the_last_end():
    def rank(comm):
        comm.clock.advance(10.0 * comm.rank)
        trainer = SimpleNamespace(mesh=SimpleNamespace(world=comm), step=lambda _: comm.clock.advance(3.0 - comm.rank))
        return layouts._step_seconds(trainer, 0)

    assert run_local(3, rank, clock="model") == [3.0] * 3


def test_a_layouts_row_has_the_fullest_rank_and_the_median_step():
    configs = layouts.configs(ModelConfig(8, 16, 4, 8, 16), 32, 4)
    for config in configs:
        layout = layouts.layout_of(config)
        assert layout.dp * layout.microbatch * layout.microbatches == 32
    config = next(config for config in configs if config.mesh.pp == 4)
    row = layouts._row(config, np.array([2.0, 9.0, 1.0]), [10, 30, 20, 25, 99])
    assert (row["seconds_min"], row["seconds"], row["seconds_max"]) == (1.0, 2.0, 9.0)
    assert row["peak_bytes"] == 30 and row["ranks_peak_bytes"] == [10, 30, 20, 25]


def test_a_pipelines_row_has_the_least_median_and_largest_bubble():
    steps = [simulate(make("1f1b", 2, 4), Durations(comm=comm)) for comm in (3, 0, 1)]
    config = TrainConfig(data=DataConfig(global_batch=8, microbatches=4))
    row = pipeline._row(config, make("1f1b", 2, 4), steps)
    bubbles = sorted(float(each.bubble_fraction) for each in steps)
    assert [row["bubble_min"], row["bubble_measured"], row["bubble_max"]] == bubbles
    assert row["batch"] == 2 and row["seconds"] == sorted(float(each.makespan) for each in steps)[1]


def test_a_measured_timeline_is_in_seconds():
    comm = serial()
    events = ({"name": "0F0", "ts": 5e6, "dur": 2e6}, {"name": "step", "ts": 0.0, "dur": 9e6})
    comm.tracer.events += [*events, {"name": "0B0", "ts": 7.5e6, "dur": 1e6}]
    assert pipeline._timeline(comm, make("gpipe", 1, 1)).makespan == 3.5


def test_the_processor_time_of_overlap_is_that_of_all_ranks(monkeypatch):
    published = []
    monkeypatch.setattr(step, "publish", lambda comm, rows, path: published.extend(rows))
    monkeypatch.setattr(step, "_timed", lambda comm, call, kind: (10.0 * comm.size, 1.0 + comm.rank))
    run_local(3, step.run_overlap, Namespace(layers=1, hidden=8, heads=2, seq_len=4, batch=1, repeat=1, json=None))
    assert {row["cpu_seconds"] for row in published} == {6.0} and {row["wall_seconds"] for row in published} == {30.0}
