"""Claims about the schedules as data: valid for any number of ranks and microbatches, and as idle and as hungry for
memory as the papers say, exactly.

Times are whole numbers or Fractions, so every `==` below is between rationals.
"""

import re
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Schedule, parse_action, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import SCHEDULES, make

pytestmark = pytest.mark.sampled(3)

SIZES = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
EQUAL = Durations(1, 1, 1)
UNEQUAL = Durations(Fraction(3, 2), Fraction(5, 3), Fraction(3, 4))
LARGE_W = Durations(2, 1, 5)
CASES = [(name, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev")]
CASES += [("interleaved-1f1b", v) for v in (1, 2, 3)]

made = cache(make)
checked = cache(lambda *case: check(made(*case)))


@cache
def timeline(name, p, m, v=None, durations=EQUAL):
    return simulate(made(name, p, m, v), durations)


def grid(name, microbatches=MICROBATCHES):
    """(p, m) for which the schedule exists."""
    exists = {"interleaved-1f1b": lambda p, m: m % p == 0, "dualpipev": lambda p, m: m >= 2 * p}
    return [(p, m) for p in SIZES for m in microbatches if exists.get(name, lambda p, m: True)(p, m)]


def idle(line):
    """For each rank the time from its first action to its last that it does not work: Zero Bubble's bubble."""
    return [row[-1].end - row[0].start - sum(slot.end - slot.start for slot in row) for row in line.ranks]


def ahead(actions):
    """Forwards before the first backward: the warm-up, and the forward that begins the steady state."""
    return [action.kind == "F" for action in actions].index(False)


def examples(text):
    """A docstring's sizes and, for each rank, its example's actions: rows of ranks, or steps with a column per rank."""
    p, m = (int(re.search(rf"\b{letter} = (\d+)", text)[1]) for letter in "pm")
    rows = [row.split() for row in re.findall(r"^ +rank \d+   (.*)$", text, re.MULTILINE)]
    steps = [line.split("|") for line in re.findall(r"^ +\d +(\|.*)$", text, re.MULTILINE)]
    rows += [[cell for step in steps for cell in step[1 + r].split()] for r in range(p if steps else 0)]
    # B takes two cells.
    return p, m, [[cell for cell, before in zip(row, [None, *row], strict=False) if cell != before] for row in rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_example_in_each_docstring_is_its_output(name):
    p, m, rows = examples(SCHEDULES[name].__doc__)
    schedule = made(name, p, m)
    output = [[str(action).removesuffix("OVERLAP_F_B") for action in actions] for actions in schedule.ranks]
    if schedule.stages == p:
        output = [[cell.removeprefix(str(r)) for cell in row] for r, row in enumerate(output)]
    assert rows == output


@pytest.mark.parametrize("name, v", CASES)
def test_every_schedule_passes_the_checker(name, v):
    for p, m in grid(name):
        schedule = made(name, p, m, v)
        checked(name, p, m, v)
        per_rank = 2 if name in ("zbv", "dualpipev") else v or 1
        assert (len(schedule.ranks), schedule.stages, schedule.microbatches) == (p, p * per_rank, m)
        homes = list(schedule.home.values())
        assert [homes.count(r) for r in range(p)] == [per_rank] * p


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, v", CASES)
def test_a_stage_takes_the_microbatches_in_order(name, v):
    """F, and what adds to the weights' gradients (B, or W): without this the sums would not be one device's bits."""
    for p, m in grid(name):
        schedule = made(name, p, m, v)
        order = {}
        for _, action in schedule:
            for part in {"B": "IW"}.get(action.kind, action.kind):
                order.setdefault((action.stage, part), []).append(action.microbatch)
        assert all(found == list(range(m)) for found in order.values())
        assert len(order) == schedule.stages * 3


@pytest.mark.parametrize("durations", [UNEQUAL, LARGE_W], ids=["small W", "large W"])
def test_bubble_fractions_are_the_closed_forms(durations):
    microbatches = (1, 2, 3, 5, 8, 16)
    for p, m in grid("naive", microbatches):
        assert timeline("naive", p, m, None, durations).bubble_fraction == Fraction(p - 1, p)
        for name in ("gpipe", "1f1b"):
            line = timeline(name, p, m, None, durations)
            assert line.bubble_fraction == Fraction(p - 1, m + p - 1)
            assert line.makespan == (m + p - 1) * (
                durations.forward + durations.backward_input + durations.backward_weight
            )


@pytest.mark.parametrize("durations", [UNEQUAL, LARGE_W], ids=["small W", "large W"])
def test_interleaving_divides_the_bubble_by_v(durations):
    """Of equal stages: ((p-1)/v) / (m + (p-1)/v) of the total, (p-1)/(vm) of the ideal time, as Megatron prints it."""
    for v in (1, 2, 3):
        for p, m in grid("interleaved-1f1b", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)):
            found = timeline("interleaved-1f1b", p, m, v, durations).bubble_fraction
            assert found == Fraction(p - 1, v) / (m + Fraction(p - 1, v))
            assert found / (1 - found) == Fraction(p - 1, v * m)


def test_interleaving_one_stage_takes_as_long_as_1f1b():
    for p, m in grid("interleaved-1f1b"):
        assert timeline("interleaved-1f1b", p, m, 1).makespan == timeline("1f1b", p, m).makespan
    assert checked("interleaved-1f1b", 4, 8, 1).peak_activations == [7, 5, 3, 1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("p", SIZES)
def test_warm_up_forwards(p):
    """1F1B p-1-r; interleaved (Megatron) 2(p-1-r) + (v-1)p; neither more than there are. Then one more, and its B."""
    for m in MICROBATCHES:
        assert [ahead(actions) for actions in made("1f1b", p, m).ranks] == [min(p - 1 - r + 1, m) for r in range(p)]
        for v in (1, 2, 3) if m % p == 0 else ():
            expected = [min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)]
            assert [ahead(actions) for actions in made("interleaved-1f1b", p, m, v).ranks] == expected


PEAKS = {
    "naive": lambda p, m, r: 1,
    "gpipe": lambda p, m, r: m,
    "1f1b": lambda p, m, r: min(m, p - r),
    "zb-h1": lambda p, m, r: min(m, p - r),  # at most p: 1F1B's
    "zb-h2": lambda p, m, r: min(m, 2 * (p - r) - 1),  # at most 2p - 1
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PEAKS)
def test_peak_activations(name):
    for p, m in grid(name):
        assert checked(name, p, m, None).peak_activations == [PEAKS[name](p, m, r) for r in range(p)]
        assert timeline(name, p, m).peak_activations == checked(name, p, m, None).peak_activations


def test_peak_activations_of_stages_that_are_parts_of_a_rank():
    for p, m in grid("zbv"):
        peaks = checked("zbv", p, m, None).peak_activations
        assert max(peaks) == min(2 * m, 2 * p)  # halves: 1F1B's p
        if m >= 2 * p - 1:
            assert peaks == [2 * p] * p  # and every rank the same, which 1F1B's are not
    for p, m in grid("dualpipev"):
        assert checked("dualpipev", p, m, None).peak_activations == [2 * p + 1] * p
    for v in (1, 2, 3):
        for p, m in grid("interleaved-1f1b"):
            expected = [min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)]
            assert checked("interleaved-1f1b", p, m, v).peak_activations == expected


def test_weight_gradients_wait_only_where_they_are_put_off():
    for p, m in grid("zb-h1"):
        assert checked("1f1b", p, m, None).peak_weight_gradients == [0] * p
        assert checked("zb-h1", p, m, None).peak_weight_gradients == [min(m, r + 1) for r in range(p)]
        assert checked("zb-h2", p, m, None).peak_weight_gradients == [min(m, 2 * r + 1) for r in range(p)]


F_I_W = [(1, 1, 1), (3, 4, 2), (4, 2, 3), (Fraction(3, 2), Fraction(5, 3), Fraction(3, 4))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("durations", F_I_W)
def test_handcrafted_schedules_are_as_idle_as_the_paper_says(durations):
    """Rank 0, the largest cost, is idle (p-1)(F+I-W) under ZB-H1 with m >= p, and (p-1)(F+I-2W) under ZB-H2 with
    m >= 2p-1; rank r (p-1-r)/(p-1) of that. The paper supposes W <= F, and for ZB-H2 2W <= F+I (or it would be
    negative); no more is needed: I may be shorter than W.
    """
    f, i, w = durations
    assert w <= f and 2 * w <= f + i
    for p in SIZES:
        for m in (p, p + 1, 2 * p - 1, 2 * p, 16):
            h1, h2 = (timeline(name, p, m, None, Durations(f, i, w)) for name in ("zb-h1", "zb-h2"))
            if m >= p:
                assert idle(h1) == [(p - 1 - r) * (f + i - w) for r in range(p)]
                assert h1.bubble_rate == (p - 1) * (f + i - w) / Fraction((p - 1) * (f + i - w) + m * (f + i + w))
            if m >= 2 * p - 1:
                assert idle(h2) == [(p - 1 - r) * (f + i - 2 * w) for r in range(p)]


def test_beyond_its_assumption_the_papers_formula_is_wrong():
    """W > F: rank r's forwards come too late for the rank after it. 2W > F+I: nothing is less idle than not at all."""
    f, i, w = 1, 4, 2
    assert max(idle(timeline("zb-h1", 4, 8, None, Durations(f, i, w)))) > 3 * (f + i - w)
    assert max(idle(timeline("zb-h2", 4, 8, None, Durations(f, i, w)))) > 3 * (f + i - 2 * w)
    assert idle(timeline("zb-h2", 4, 8, None, Durations(2, 1, 2))) == [0] * 4


def test_equal_times_leave_zb_h1_a_third_and_zb_h2_zbv_no_bubble():
    for p, m in grid("zbv"):
        if m >= 2 * p - 1:
            assert 3 * max(idle(timeline("zb-h1", p, m))) == max(idle(timeline("1f1b", p, m)))
            assert idle(timeline("zb-h2", p, m)) == idle(timeline("zbv", p, m)) == [0] * p
            assert timeline("zbv", p, m).bubble_rate == 0
            # Not even the start is lost as it is in ZB-H2: the ranks begin one half-sized forward after another.
            assert timeline("zbv", p, m).makespan == 6 * m + p - 1


@pytest.mark.parametrize("exchange", [0, Fraction(1, 4), 1])
def test_dualpipevs_bubble_is_the_papers(exchange):
    """(p-1)(F&B + B - 3W) on the rank that idles most, and on all ranks if nothing is hidden (arXiv 2412.19437, Table
    2; its PP is 2p). The all-to-alls are a part of F and of I, and a pair hides them.
    """
    durations = Durations(1 + exchange, 1 + exchange, 1, exchange=exchange)
    for p, m in [*grid("dualpipev"), (8, 32)]:
        line = timeline("dualpipev", p, m, None, durations)
        bubbles = [line.makespan - sum(slot.end - slot.start for slot in row) for row in line.ranks]
        assert max(bubbles) == (p - 1) * (3 + (2 + exchange) - 3)  # F&B = 3: the computation alone
        assert exchange or set(bubbles) == {2 * (p - 1)}


@pytest.mark.parametrize("exchange", [0, 1])
def test_dualpipevs_last_rank_is_idle_for_three_reasons(exchange):
    """F at first, F&B - B between backwards and I - W in the end, each p - 1 times, if W <= I <= F (chapter 8).

    With F = I = B - W their sum is the paper's (p-1)(F&B + B - 3W).
    """
    for f, i, w in ((4, 4, 3), (5, 4, 2), (6, 6, 6), (7, 3, 1)):
        durations = Durations(f, i, w, exchange=exchange)
        pair = f + i + w - 2 * exchange
        for p, m in grid("dualpipev"):
            line = timeline("dualpipev", p, m, None, durations)
            last = line.ranks[-1]
            between = sum(after.start - before.end for before, after in pairwise(last))
            assert last[0].start == (p - 1) * f
            assert between == (p - 1) * (pair - i - w)
            assert line.makespan - last[-1].end == (p - 1) * (i - w)


def test_a_pair_takes_what_its_computer_or_its_network_takes():
    pair = parse_action("(0F1;1B0)OVERLAP_F_B")
    assert Durations(1, 1, 1).of(pair) == 3  # one core: F + B
    for exchange, time in ((0, 7), (1, 5), (Fraction(3, 2), 4), (2, 4), (Fraction(5, 2), 5)):
        # F = 3 and B = 4 (of which the exchange): all computing, B alone, or all communication.
        assert Durations(3, 3, 1, exchange=exchange).of(pair) == time
    table = {(0, "F"): 5, (1, "B"): 9}
    assert Durations(table=table, exchange=2).of(pair) == 10
    with pytest.raises(UsageError, match="a duration of -1"):
        Durations(exchange=-1)


def test_overlap_pays_for_dualpipevs_larger_bubble():
    """Without all-to-alls zbv has none of F = I = W's bubble; with them every pair saves two."""
    assert timeline("dualpipev", 4, 16).makespan == timeline("zbv", 4, 16).makespan + 3
    slow = Durations(Fraction(3, 2), Fraction(3, 2), 1, exchange=Fraction(1, 2))
    zbv, dual = (timeline(name, 4, 16, None, slow).makespan for name in ("zbv", "dualpipev"))
    assert (zbv, dual) == (Fraction(265, 2), Fraction(225, 2))


def test_the_first_row_of_zero_bubbles_tables():
    """arXiv 2401.10241, Tables 5 and 6: p = 8, m = 24."""
    durations = Durations(18.522, 18.086, 9.337, 0.601)
    found = [round(timeline(name, 8, 24, None, durations).bubble_rate, 4) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert found == [0.2431, 0.1585, 0.1083]


def test_the_two_bubble_conventions_agree_on_outer_ranks():
    line = timeline("1f1b", 4, 8)
    assert line.bubble_rate == line.bubble_fraction == Fraction(3, 11)
    line = timeline("zb-h1", 4, 8)
    assert (line.bubble_rate, line.bubble_fraction) == (Fraction(3, 27), Fraction(3, 27))
    line = timeline("zb-h2", 4, 8)  # every rank ends with the last: the fraction counts the staggered start
    assert (line.bubble_rate, line.bubble_fraction) == (0, Fraction(3, 27))


def test_the_bubble_rate_is_the_costliest_ranks():
    mirrored = Schedule.of("mirrored", made("zb-h1", 4, 8).ranks[::-1])
    assert simulate(mirrored).bubble_rate == timeline("zb-h1", 4, 8).bubble_rate == Fraction(3, 27)


def test_a_message_takes_time_between_ranks_and_none_within():
    slow = Durations(1, 1, 1, 10)
    assert simulate(made("1f1b", 1, 3), slow).makespan == 9
    assert simulate(made("gpipe", 2, 1), slow).makespan == 1 + 10 + 1 + 2 + 10 + 2
    # zbv: stages 1 and 2 are both on rank 1, and 3 is on rank 0, where the backward turns. Rank 1 does 2W0 before 1I0.
    assert simulate(made("zbv", 2, 1), slow).makespan == (1 + 10 + 2 + 10 + 2) + 10 + 3 + 10 + 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 7), (8, 12)])
def test_dualpipev_needs_twice_as_many_microbatches_as_ranks(p, m):
    with pytest.raises(UsageError, match=rf"microbatches {m} are fewer than 2\*pp = 2\*{p} = {2 * p}$"):
        make("dualpipev", p, m)
    assert make("dualpipev", p, 2 * p).microbatches == 2 * p


@pytest.mark.sampled(1)
@pytest.mark.parametrize("p, m", [(4, 6), (4, 2), (8, 12), (3, 1)])
def test_interleaving_needs_whole_groups_of_microbatches(p, m):
    with pytest.raises(UsageError, match=f"microbatches/pp = {m}/{p} is not whole"):
        make("interleaved-1f1b", p, m, 2)


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(UsageError, match=f"schedule 2f2b: choose from {', '.join(SCHEDULES)}"):
        make("2f2b", 2, 2)
    for name in ("pipedream", "pipedream-2bw"):
        with pytest.raises(UsageError, match=f"schedule {name} is asynchronous"):
            make(name, 2, 2)
    for name in SCHEDULES:
        for p, m, v in ((0, 4, None), (-2, 4, None), (2, 0, None), (2, -1, None), (2, 4, 0), (2, 4, -3)):
            with pytest.raises(UsageError, match=f"{name}: pp = {p}, microbatches = {m}.* = {v}: each is at least 1"):
                make(name, p, m, v)
        if name != "interleaved-1f1b":
            with pytest.raises(UsageError, match=f"schedule {name} has . stages? per rank, not 3"):
                make(name, 2, 4, 3)
    assert make("zbv", 2, 4, 2) == make("zbv", 2, 4) and make("1f1b", 2, 4, 1) == make("1f1b", 2, 4)
    assert make("interleaved-1f1b", 2, 4) == make("interleaved-1f1b", 2, 4, 2)
    with pytest.raises(UsageError, match="zbv has 2 stages per rank, not 1"):
        make("zbv", 2, 4, 1)
