"""The planner's first choices, as the planning chapters' pictures need them."""

from chapters.support.ch10.three_models import LARGE, SMALL, fastest, first_choice, scaling, spending

CHOICE = {"mesh": (8, 4, 2), "zero": 1, "time": {"compute": 3.0, "bubble": 1.0}, "mfu": 0.5, "tokens": 100.0}


def test_first_choice_fits_or_is_none():
    choice = first_choice(SMALL, "a100", 64)
    assert choice["mesh"] == (64, 1, 1) and choice["zero"] == 1
    assert sum(choice["time"].values()) == choice["total"]
    assert first_choice(LARGE, "a100", 64) is None


def test_fastest_is_none_where_a_replica_has_no_sequence():
    assert fastest(1, 1, 3, 2048) is None
    assert fastest(2, 1, 3, 2048)[1] == "selective"


def test_pictures_get_each_choice_once():
    plans = {(SMALL, "a100", 64): CHOICE, (SMALL, "h100", 64): CHOICE, (LARGE, "a100", 64): None}
    bars = spending(plans, "a100")
    assert bars == {"7.5B": {"64 GPUs\ndp 8\ntp 4\npp 2\nZeRO-1": (CHOICE["time"], 0.5)}, "70B": {}, "1T": {}}
    assert scaling(plans) == {"A100": {"7.5B": {64: (100.0, 0.5)}}, "H100": {"7.5B": {64: (100.0, 0.5)}}}
