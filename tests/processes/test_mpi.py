"""Collectives over MPI equal NumPy's and MPI's own, at more numbers of ranks; what a step over MPI overlaps."""

import json

import pytest
from launcher import run_mpi


@pytest.mark.parametrize("p", [1, 2, 4, 5, 8])
def test_collectives_over_mpi(p):
    result = run_mpi(p, "from minipar import launch\nfrom mpi_collectives import program\nlaunch(program)", timeout=90)
    assert (result.returncode, result.stdout) == (0, "every claim holds\n"), result.stderr


def test_gradients_are_summed_while_the_backward_pass_runs(tmp_path):
    """In the trace of a training, whose clock counts no waiting. Each of its messages is an arrow with both ends."""
    path = tmp_path / "trace.json"
    size = "--layers 6 --hidden 256 --heads 4 --seq-len 16 --global-batch 6 --steps 2"
    flags = ["--dp", "3", "--clock", "cpu", "--trace", str(path)]
    result = run_mpi(3, ["-m", "minipar.train", *size.split(), *flags])
    assert result.returncode == 0, result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    starts, ends = ([event["id"] for event in events if event["ph"] == half] for half in "sf")
    assert sorted(starts) == sorted(ends) and len(starts) > 0
    for rank in range(3):
        times = {"backward": [], "all_reduce": []}
        for event in events:
            if event["ph"] == "X" and event["pid"] == rank and event["name"] in times:
                times[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
        assert len(times["backward"]) == 2
        for start, end in times["backward"]:
            assert any(start < begins and ends < end for begins, ends in times["all_reduce"])
