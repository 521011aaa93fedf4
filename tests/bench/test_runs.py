"""Claims about what a benchmark runs: the chosen algorithms and sizes, and no step that only warms up."""

from argparse import ArgumentParser, Namespace

import pytest
from training import config_for

from minipar.bench import collectives, pipeline
from minipar.comm import run_local, serial
from minipar.errors import UsageError


@pytest.mark.parametrize("name", ["repeat", "batch", "microbatches"])
def test_a_pipelines_counts_are_at_least_1(name):
    parser = ArgumentParser()
    pipeline.add_arguments(parser)
    with pytest.raises(UsageError, match=f"--{name} 0"):
        run_local(2, pipeline.run, parser.parse_args([f"--{name}", "0"]))


def test_steps_that_warm_up_are_not_measured(monkeypatch):
    monkeypatch.setattr(pipeline, "_row", lambda config, schedule, timelines: len(timelines))
    config = config_for("--pp 2 --layers 2 --hidden 8 --heads 2 --seq-len 8 --global-batch 2 --microbatches 2")
    assert run_local(2, lambda comm: pipeline.measure(comm, {"1f1b": config}, 3)) == [[3], []]


ALL = ["auto", *collectives.ALGORITHMS["all_reduce"]]


@pytest.mark.parametrize(
    ("chosen", "ops", "expected"),
    [
        ("auto", "all_reduce,barrier", [("auto", 1024), ("auto", 2000), ("auto", 0)]),
        ("all", "all_reduce", [(algorithm, nbytes) for algorithm in ALL for nbytes in (1024, 2000)]),
    ],
)
def test_the_chosen_algorithms_are_measured_at_each_size(chosen, ops, expected, monkeypatch):
    """A barrier has no size."""
    measured = []
    monkeypatch.setattr(collectives, "measure", lambda comm, op, algorithm, n, dtype: measured.append((algorithm, n)))
    monkeypatch.setattr(collectives, "publish", lambda comm, rows, path: None)
    given = Namespace(ops=ops, sizes="1K,2000", algorithms=chosen, dtype="float32", json=None)
    collectives.run(serial(), given)
    assert measured == expected
