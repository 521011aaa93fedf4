"""Claims about DualPipe, the two pipelines of which DualPipeV is one half."""

from fractions import Fraction

import pytest

from chapters.support.ch08.dualpipe import dualpipe
from chapters.support.ch08.exchange import ExchangeDurations
from minipar.parallel.pipeline.actions import Durations, parse_action, simulate
from minipar.parallel.pipeline.schedules import make

SIZES = [(1, 2), (2, 4), (2, 9), (3, 7), (4, 8)]


def times(row):
    return [(slot.start, slot.end) for slot in row]


def test_a_microbatch_stays_in_its_model():
    mine = dualpipe(4, 5)

    def needs(text):
        return [str(need) for need in mine.needs(parse_action(text))]

    assert needs("0F1") == needs("4F1") == [] and needs("5F1") == ["4F1"]  # 4 is the copy's first stage
    assert needs("3B1") == ["3F1"] and needs("2B1") == ["2F1", "3B1"] and needs("7B1") == ["7F1"]
    assert needs("(5F2;2B1)OVERLAP_F_B") == ["4F2", "2F1", "3B1"]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipe_takes_the_times_of_the_v(p, m):
    for f, i, w, exchange in ((4, 4, 3, 0), (5, 4, 2, 1), (3, 6, 1, 0)):
        durations = ExchangeDurations(f, i, w, exchange=exchange)
        v, both = simulate(make("dualpipev", p, m), durations), simulate(dualpipe(2 * p, m), durations)
        for r, row in enumerate(v.ranks):
            assert times(both.ranks[r]) == times(both.ranks[2 * p - 1 - r]) == times(row)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipe_idles_as_the_paper_says_with_one_more_alive(p, m):
    """(PP/2 - 1)(F&B + B - 3W) on the ranks in the middle, and PP + 1 activations, with PP = 2p ranks."""
    for f, i, w, exchange in ((4, 4, 3, 0), (5, 5, 2, 1), (6, 6, 6, 0)):
        both = simulate(dualpipe(2 * p, m), ExchangeDurations(f, i, w, exchange=exchange))
        pair, b = f + i + w - 2 * exchange, i + w
        for row in both.ranks[p - 1 : p + 1]:
            assert both.makespan - sum(end - start for start, end in times(row)) == (p - 1) * (pair + b - 3 * w)
        assert both.peak_activations == [2 * p + 1] * (2 * p)


def test_messages_in_the_middle_make_dualpipe_longer_than_the_v():
    slow = Durations(4, 4, 3, comm=1)
    assert simulate(make("dualpipev", 2, 4), slow).makespan == 101
    assert simulate(dualpipe(4, 4), slow).makespan == 106


@pytest.mark.parametrize("exchange", [Fraction(1, 4), 1])
def test_dualpipev_hides_the_all_to_alls(exchange):
    """Its bubble is the paper's on the rank that idles most. The all-to-alls are a part of F and of I."""
    durations = ExchangeDurations(1 + exchange, 1 + exchange, 1, exchange=exchange)
    for p, m in [*SIZES, (8, 32)]:
        line = simulate(make("dualpipev", p, m), durations)
        bubbles = [line.makespan - sum(end - start for start, end in times(row)) for row in line.ranks]
        assert max(bubbles) == (p - 1) * (3 + (2 + exchange) - 3)  # F&B = 3: the computation alone


def test_a_pair_takes_what_its_computer_or_its_network_takes():
    pair = parse_action("(0F1;1B0)OVERLAP_F_B")
    for exchange, time in ((0, 7), (1, 5), (Fraction(3, 2), 4), (2, 4), (Fraction(5, 2), 5)):
        # F = 3 and B = 4 (of which the exchange): all computing, B alone, or all communication.
        assert ExchangeDurations(3, 3, 1, exchange=exchange).of(pair) == time
