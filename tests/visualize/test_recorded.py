"""A change that should change no picture changes none: one of each kind shows what it showed, where it did."""

import pytest
from picture_text import PICTURES, RECORDED, recorded_text


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_recorded_one(name):
    recorded = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    assert recorded_text(name).splitlines() == recorded.splitlines()
