"""The picture of a comparison: grey where two runs are equal, and a colour that is the ratio elsewhere."""

import math

import pytest
from matplotlib.colors import to_rgb

from minipar.errors import UsageError
from visualize import plot_comparison, read_comparison
from visualize.comparison import EQUAL
from visualize.style import BLUE, INK, VERMILION

STEPS = {0: {"a": None, "b": 8.0, "c": 1 / 8}, 1: {"a": 1 + 1e-9, "b": math.inf, "c": 0.0}}


def pixels(figure):
    return figure.axes[0].images[0].get_array().tolist()


def test_a_pixel_is_grey_if_equal_and_else_the_ratios_colour():
    figure = plot_comparison(STEPS)
    expected = [[EQUAL, "#FFFFFF"], [VERMILION, INK], [BLUE, INK]]  # (parameters, steps)
    assert pixels(figure) == [[pytest.approx(to_rgb(colour), abs=0.01) for colour in row] for row in expected]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
    assert "they differ from step 0 on" in figure.axes[0].get_title(loc="left")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["equal within rounding", "zero in one run"]


def test_the_scale_names_ratios_where_their_colours_are():
    scale = plot_comparison(STEPS).axes[1]
    named = {label.get_text(): label.get_position()[1] for label in scale.get_yticklabels()}
    assert named == {"1/8": -3, "1/4": -2, "1/2": -1, "1": 0, "2": 1, "4": 2, "8": 3}


def test_equal_runs_are_grey_and_the_title_says_so():
    figure = plot_comparison({3: {"a": None}, 4: {"a": None}})
    assert pixels(figure) == [[pytest.approx(to_rgb(EQUAL))] * 2]
    assert "they are equal in every step" in figure.axes[0].get_title(loc="left")


def test_many_parameters_are_all_drawn_and_some_named():
    figure = plot_comparison({step: {f"p{i}": 2.0 for i in range(400)} for step in range(50)})
    assert len(pixels(figure)) == 400 and len(pixels(figure)[0]) == 50
    assert len(figure.axes[0].get_yticks()) <= 60 and len(figure.axes[0].get_xticks()) <= 12
    heights = [plot_comparison({0: dict.fromkeys(map(str, range(n)), 2.0)}).get_figheight() for n in (8, 50, 400)]
    assert heights == [3.0, pytest.approx(9.6), 14.0]


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"ratios": {}}',
        '{"ratios": {"0": {}}}',
        '{"ratios": {"x": {"a": 1}}}',
        '{"ratios": {"0": {"a": "much"}}}',
        '{"ratios": {"0": {"a": -1}}}',
        '{"ratios": {"0": {"a": 1}, "1": {"b": 1}}}',
    ],
)
def test_another_file_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UsageError, match="not written by minipar.compare --json"):
        read_comparison(str(tmp_path / "x.json"))
