"""Colours, units and words that all pictures share: their values are known or reckoned by hand."""

import pytest
from matplotlib import rc_context

from visualize import style
from visualize.style import (
    AXIS_COLOURS,
    COLOURS,
    GREEN,
    GREY,
    INK,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    at_lightness,
    byte_label,
    byte_unit,
    colours,
    ink_on,
    lightness,
    signed_percent,
)
from visualize.timeline import time_unit


def test_unknown_names_take_the_free_colours_in_turn():
    expected = [GREY, SKY, VERMILION, YELLOW, PURPLE, GREEN, GREY, GREY]
    assert colours("hgfedcba") == dict(zip("abcdefgh", expected, strict=True))


def test_known_names_keep_their_colours_and_come_first():
    chosen = colours(["zeta", "all_reduce", "optimizer", "alpha", "backward", "forward"])
    assert list(chosen) == ["forward", "backward", "optimizer", "all_reduce", "alpha", "zeta"]
    assert [chosen["alpha"], chosen["zeta"]] == [GREY, VERMILION]


@pytest.mark.parametrize(
    ("colour", "light"),
    [("#FF0000", 53.24), ("#00FF00", 87.73), ("#0000FF", 32.30), ("#0A0A0A", 2.74), ("#101010", 4.68)],
)
def test_lightness_of_pure_and_of_dark_colours(colour, light):
    """CIE L* of sRGB's primaries under D65, and of greys near black, where L* is linear."""
    assert lightness(colour) == pytest.approx(light, abs=0.01)


def test_the_axes_have_lightnesses_far_apart():
    light = {axis: round(lightness(colour)) for axis, colour in AXIS_COLOURS.items()}
    assert light == {"tp": 65, "cp": 8, "ep": 88, "dp": 32, "pp": 48}


def test_letters_are_white_on_what_is_darker_than_55():
    assert 54 < lightness("#838383") < 55 < lightness("#848484") < 56
    assert (ink_on("#838383"), ink_on("#848484")) == ("white", INK)


def test_a_colour_is_mixed_with_white_or_black():
    for target in (10, 90):
        assert lightness(at_lightness(COLOURS["F"], target)) == pytest.approx(target, abs=0.3)
    assert at_lightness("#000000", 100) == "#ffffff" and at_lightness("#ffffff", 0) == "#010101"


def test_bytes_have_four_digits_or_three_below_one():
    assert [byte_label(value) for value in (0, 1, 1023, 1024, 1234567, 3 * 2**30)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1.177 MiB", "3 GiB",
    ]  # fmt: skip


def test_bytes_in_a_given_unit_have_as_many_digits():
    unit = ("KiB", 1024)
    assert [byte_label(value, unit) for value in (100.5, 1023.9, 1265, 2**20)] == [
        "0.0981 KiB", "1 KiB", "1.235 KiB", "1024 KiB",
    ]  # fmt: skip


def test_a_unit_of_bytes_is_the_largest_that_fits():
    assert [byte_unit(value) for value in (0, -1023, -1024, 2**20)] == [
        ("B", 1), ("B", 1), ("KiB", 1024), ("MiB", 2**20),
    ]  # fmt: skip


def test_a_ratio_is_written_as_its_distance_from_one():
    ratios = [1.11, 0.999, 1.004, 0.5, 2.0, 0.991]
    assert [signed_percent(ratio) for ratio in ratios] == ["+11 %", "0 %", "0 %", "-50 %", "+100 %", "-1 %"]


def test_a_time_changes_its_unit_at_two():
    units = {2.0: ("s", 1.0), 1.999: ("ms", 1e3), 2e-3: ("ms", 1e3), 3.9e-3: ("ms", 1e3), 1.999e-3: ("µs", 1e6)}
    assert {seconds: time_unit(seconds) for seconds in units} == units


def test_a_notebook_gets_a_png_whatever_files_are_by_default():
    with rc_context({"savefig.format": "pdf"}):
        assert style.picture(2.0, 1.0)._repr_png_().startswith(b"\x89PNG")


def test_a_tidy_panel_has_a_light_grid_behind_and_no_frame_above():
    axes = style.picture(2.0, 1.0).add_subplot()
    style.tidy(axes)
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["left", "bottom"]
    lines = [*axes.get_xgridlines(), *axes.get_ygridlines()]
    assert lines and all(line.get_visible() and line.get_color() == style.PAPER for line in lines)
    assert axes.get_axisbelow() is True
