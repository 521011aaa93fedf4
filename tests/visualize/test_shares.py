"""Claims about what ranks do with their time: the shares are those of what the timeline draws."""

import json

import pytest
from picture_cases import chrome

from visualize.__main__ import main
from visualize.shares import Shares, rank_shares, trace_values
from visualize.timeline import COMPUTATION, Slice, parse_trace

DP, TP = "communication dp", "communication tp"
# Of a step of `chrome()`: forward 2, backward 4, all_reduce 3 of which 1 is waiting, optimizer 1.
STEP = Shares(computing=0.7, communicating=0.2, waiting=0.1, neither=0)


def test_shares_of_a_step_made_by_hand():
    trace = parse_trace(chrome())
    for tracks in trace.ranks.values():
        assert rank_shares(tracks, 0, 10) == STEP
        assert rank_shares(tracks, 5, 7) == Shares(computing=0.5, communicating=0, waiting=0.5, neither=0)


def test_what_overlaps_counts_in_both_shares_and_once_in_each():
    tracks = {
        COMPUTATION: [Slice("backward", 0, 4), Slice("inner", 1, 3)],
        DP: [Slice("all_reduce", 2, 6, 1)],
        TP: [Slice("all_reduce", 3, 5)],
        "another track": [Slice("x", 0, 8)],
    }
    assert rank_shares(tracks, 0, 8) == Shares(computing=4 / 8, communicating=3 / 8, waiting=1 / 8, neither=2 / 8)


def test_the_command_writes_the_shares_of_the_steps_shown(write, capsys):
    path = write("t.json", chrome())
    assert main(["trace", path, "--json", "-", "--steps", "0:2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(trace_values(parse_trace(chrome()), slice(0, 2))))
    assert (printed["step_seconds"], printed["shown"]) == ([10.0, 10.0, 10.0], [0.0, 20.0])
    assert printed["ranks"]["2"] == pytest.approx(vars(STEP))
