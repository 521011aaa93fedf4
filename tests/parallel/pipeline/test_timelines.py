"""Claims about timelines that no schedule of minipar's own has: empty ones, single actions, times of several types."""

from fractions import Fraction

import pytest
from schedule_cases import schedule

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, Schedule, Slot, Timeline, peak_live, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.in_order import simulate_in_order
from minipar.parallel.pipeline.stage import balanced_cuts


def measured(*rows):
    """Return a timeline with these (start, end) of forwards for each rank, as a measured one has them."""
    slots = [[Slot(Action(rank, "F", i), *times) for i, times in enumerate(row)] for rank, row in enumerate(rows)]
    lists = [[slot.action for slot in row] for row in slots]
    return Timeline(Schedule.of("measured", lists), tuple(tuple(row) for row in slots))


def test_a_timeline_without_actions_takes_and_idles_no_time():
    line = measured([], [])
    assert (line.makespan, line.bubble_fraction, line.bubble_rate, line.peak_activations) == (0, 0, 0, [0, 0])
    assert (line.comm, line.messages, line.events()) == (0, (), [])


def test_a_rank_without_actions_costs_nothing():
    line = measured([], [(2, 3), (5, 6)])
    assert (line.makespan, line.bubble_fraction, line.bubble_rate) == (6, Fraction(10, 12), Fraction(1, 2))


def test_a_rank_of_one_action_is_never_idle():
    assert measured([(4, 5)]).bubble_rate == 0 and measured([(0, 1)]).bubble_fraction == 0


def test_actions_that_take_no_time_leave_no_bubble():
    line = simulate(schedule("0F0 0B0"), Durations(0, 0, 0))
    assert (line.makespan, line.bubble_fraction, line.bubble_rate) == (0, 0, 0)


def test_a_step_that_takes_1_has_its_bubble_as_any_other():
    line = measured([(0, Fraction(1, 4)), (Fraction(3, 4), 1)])
    assert line.bubble_fraction == line.bubble_rate == Fraction(1, 2)


def test_a_bubble_is_a_fraction_if_no_time_is_a_float():
    exact = measured([(0, 1), (2, 3)])
    assert type(exact.bubble_fraction) is Fraction and exact.bubble_fraction == Fraction(1, 3)
    assert type(measured([(0.0, 1.0), (2.0, 3.0)]).bubble_fraction) is float
    mixed = measured([(0, 1), (2, 4)], [(0.5, 1.5)])  # the last end is an int
    assert type(mixed.bubble_fraction) is float and mixed.bubble_fraction == 0.5


def test_what_ends_at_a_time_comes_before_what_starts_then():
    line = measured([(0, 1), (1, 2)], [(1, 3)])
    first, second, other = Action(0, "F", 0), Action(0, "F", 1), Action(1, "F", 0)
    assert line.events() == [
        (0, "start", 0, first),
        (1, "end", 0, first),
        (1, "start", 0, second),
        (1, "start", 1, other),
        (2, "end", 0, second),
        (3, "end", 1, other),
    ]


def test_activations_alive_are_those_between_f_and_b_or_i():
    (actions,) = schedule("0F0 0F1 0B0 0F2 0I1 0B2 0W1").ranks
    assert peak_live(actions) == 2 and peak_live(actions[2:3]) == 0
    assert peak_live(actions, made_by=("I",), freed_by=("W",)) == 1


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_timeline_in_order_has_the_times_of_its_messages():
    """A message of 3 moves when it is posted at both ends and the rank's channel is free."""
    mine = lower(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    line = simulate_in_order(mine, Durations(1, 1, 1, 3), "rank")
    assert line.comm == 3
    times = {str(slot.action): (slot.start, slot.end) for slot in line.messages}
    assert times == {"0SEND_F0": (1, 4), "0SEND_F1": (5, 8), "1SEND_B0": (8, 11), "1SEND_B1": (13, 16)}
    found = {str(slot.action): (slot.start, slot.end) for row in line.ranks for slot in row}
    assert found == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0B0": (11, 13),
        "0B1": (16, 18),
        "1F0": (4, 5),
        "1B0": (5, 7),
        "1F1": (8, 9),
        "1B1": (9, 11),
    }


@pytest.mark.parametrize("row", ["", "1SEND_B0 1RECV_F0"])
def test_a_rank_that_computes_nothing_is_refused(row):
    with pytest.raises(UsageError, match="^schedule mine, rank 1: it computes nothing$"):
        check(schedule("0F0 0B0", row))


# ---- cuts ------------------------------------------------------------------------------------------------------------


def test_costs_below_one_are_balanced_too():
    assert balanced_cuts([0, 0.1, 0.1, 0.1, 0.1, 0], 2) == [3, 3]
    assert balanced_cuts([0, 0.1, 0.1, 0.1, 0.1, 0.2], 2) == [4, 2]
