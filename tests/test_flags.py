"""Existing command lines keep working: each flag still takes what it took, and has the same default and limits."""

from command_flags import RECORDED, every_flag


def test_flags_defaults_and_limits_are_the_recorded_ones():
    assert every_flag().splitlines() == RECORDED.read_text(encoding="utf-8").splitlines()
