"""Figures of chapter 13: what is drawn is what was given."""

import numpy as np
from matplotlib.colors import to_hex

from chapters.support.ch13 import figures


def texts_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_each_bit_of_a_format_has_a_box():
    (axes,) = figures.plot_bits({"wide": (3, 4), "narrow": (2, 1)}).axes
    rows = [[patch for patch in axes.patches if int(patch.get_y()) == row] for row in range(2)]
    parts = [[patch for patch in row if to_hex(patch.get_facecolor()) != "#ffffff"] for row in rows]
    assert [[round(part.get_width()) for part in row] for row in parts] == [[1, 3, 4], [1, 2, 1]]
    assert [len(row) - 3 for row in rows] == [2 * (2 + 3), 2 * (1 + 0)], "two notches between neighbours of a part"
    rows = parts
    expected = [figures.PARTS[part] for part in ("sign", "exponent", "mantissa")]
    assert [to_hex(patch.get_facecolor()).upper() for patch in rows[0]] == expected
    assert [text.get_text() for text in axes.texts] == ["3", "4", "2", "1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["wide", "narrow"]


def test_a_weights_curves_start_in_the_band_of_rounding():
    curves = {"exact": [1, 1.5], "rounded": [1, 1]}
    (axes,) = figures.plot_weight(curves, 0.125, 0.25).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 1.5], [1, 1]]
    band = axes.patches[0]
    assert (band.get_y(), band.get_height()) == (0.875, 0.375)
    assert texts_of(axes.get_legend()) == ["exact", "rounded"]


def test_gradients_are_shown_with_and_without_the_scale():
    sizes = np.array([-20.5, -20.5, -3.0, -1.0])
    left, right = figures.plot_scales(sizes, 16, {"a": [1, 2], "b": [3, 4]}, [0, 2]).axes
    plain, scaled = (patch.get_data() for patch in left.patches[-2:])
    for values, (shares, edges, _) in ((sizes, plain), (sizes + 16, scaled)):
        assert shares.sum() == 100
        assert shares[np.searchsorted(edges, values[0], "right") - 1] == 50
    assert [list(line.get_ydata()) for line in right.lines] == [[1, 2], [3, 4]]


def test_errors_of_sums_stand_beside_their_bound():
    (axes,) = figures.plot_ring_error([2, 4, 8], {"long": [1, 2, 3], "short": [1, 2]}, [4, 5, 6]).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[4, 5, 6], [1, 2, 3], [1, 2]]
    assert list(axes.lines[2].get_xdata()) == [2, 4]
    assert texts_of(axes.get_legend())[1:] == ["long", "short"]


def test_partial_sums_and_trainings_are_drawn():
    partial = {"exact": [1, 0.5, 0], "bf16": [1, 1]}
    left, right = figures.plot_standing_still(partial, {"good": [1, 0.1], "bad": [1, 2]}, 1.0).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[1, 0.5, 0], [1, 1]]
    assert [line.get_xdata()[-1] for line in left.lines] == [100, 100]
    assert [list(line.get_ydata()) for line in right.lines] == [[1, 0.1], [1, 2], [1, 1]]


def test_losses_are_means_over_a_window():
    left, right = figures.plot_losses({"a": [4, 2, 2, 0], "b": [1, 1, 1, 1]}, 2).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[3, 2, 1], [1, 1, 1]]
    assert list(left.lines[0].get_xdata()) == [2, 3, 4]
    assert [list(line.get_ydata()) for line in right.lines] == [[1], [1]]


def test_rounding_errors_end_where_a_format_ends():
    (axes,) = figures.plot_roundoff(np.array([0, 1]), {"a": np.array([0.5, np.nan])}).axes
    assert np.array_equal(axes.lines[0].get_ydata(), [0.5, np.nan], equal_nan=True)
    assert axes.get_yscale() == "log"
