"""A change that should change no picture changes none: each element is where it was, and looks and reads as it did."""

import pytest
from picture_text import PICTURES, RECORDED, as_text


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_recorded_one(name):
    recorded = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    assert as_text(PICTURES[name]()).splitlines() == recorded.splitlines()


def test_every_recorded_picture_is_drawn():
    assert set(PICTURES) == {path.stem for path in RECORDED.glob("*.txt")}
