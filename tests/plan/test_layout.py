"""Claims about a layout of the planner: its name says what it does, and nothing that it does not do."""

import pytest

from minipar.plan.layout import Layout

PLAIN = "dp 4, tp 1, pp 1, ZeRO-1, microbatch 2 x 8"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PLAIN),
        ({"zero_replicas": 2}, PLAIN.replace("ZeRO-1", "ZeRO-1 in 2 replicas")),
        ({"cp": 2}, PLAIN.replace("tp 1", "cp 2 (ring), tp 1")),
        ({"cp": 2, "cp_order": "contiguous"}, PLAIN.replace("tp 1", "cp 2 (ring contiguous), tp 1")),
        ({"ep": 2}, PLAIN.replace("tp 1", "ep 2, tp 1")),
        ({"cp": 2, "ep": 8}, PLAIN.replace("tp 1", "cp 2 (ring), ep 8, tp 1")),
        ({"pp": 2}, PLAIN.replace("pp 1", "pp 2") + ", 1f1b"),
        ({"pp": 2, "virtual_stages": 3}, PLAIN.replace("pp 1", "pp 2") + ", 1f1b v=3"),
        ({"virtual_stages": 3}, PLAIN),
        ({"sequence_parallel": True}, PLAIN + ", sequence-parallel"),
        ({"recompute": "full"}, PLAIN + ", full recompute"),
        ({"recompute": "selective"}, PLAIN + ", selective recompute"),
        ({"attention": "flash"}, PLAIN + ", flash attention"),
    ],
)
def test_a_layouts_name_says_what_it_does(changes, expected):
    settings = {"dp": 4, "tp": 1, "pp": 1, "zero": 1, "microbatch": 2, "microbatches": 8} | changes
    assert str(Layout(**settings)) == expected
