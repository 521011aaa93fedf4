"""A reader's prediction is kept, and the cell that shows the result compares it."""

import pytest

from chapters.support.predict import predict, reveal


def printed(predicted, result, unit=""):
    lines = []
    predict("bytes", predicted)
    reveal("bytes", result, lines.append, unit)
    return lines


def test_a_reader_who_predicts_nothing_sees_the_result():
    assert printed(..., 14336, "bytes") == ["bytes: 14,336 bytes"]


@pytest.mark.parametrize(("predicted", "result"), [(14336, 14336), (0.5, 0.502), ("rank 3", "rank 3"), (False, False)])
def test_a_right_prediction_is_said_to_be_right(predicted, result):
    assert printed(predicted, result)[0].endswith(", as you predicted")


def test_a_wrong_prediction_is_shown_with_its_factor():
    assert printed(7168, 14336) == ["bytes: 14,336; you predicted 7,168, and the result is 2 times that"]
    assert printed(0.5, 0.52) == ["bytes: 0.52; you predicted 0.5, and the result is 1.04 times that"]
    assert printed(14337, 14336)[0].endswith("and the result is 1 times that")


def test_what_is_no_quantity_has_no_factor():
    assert printed("rank 2", "rank 3") == ["bytes: rank 3; you predicted rank 2"]
    assert printed(True, False) == ["bytes: False; you predicted True"]
    assert printed(1, 0) == ["bytes: 0; you predicted 1"]


def test_a_set_is_shown_in_the_same_order_in_every_run():
    checks = {"ranks", "bytes", "loss", "one device", "norm", "memory"}
    assert printed(..., checks) == ["bytes: {'bytes', 'loss', 'memory', 'norm', 'one device', 'ranks'}"]
    assert printed(checks, set()) == [
        "bytes: set(); you predicted {'bytes', 'loss', 'memory', 'norm', 'one device', 'ranks'}"
    ]


def test_a_result_that_nobody_asked_for_is_a_mistake():
    with pytest.raises(KeyError):
        reveal("never asked", 1)
