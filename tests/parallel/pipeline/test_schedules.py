"""Claims about the schedules as data: valid for any number of ranks and microbatches, and as idle and as hungry for
memory as the papers say, exactly.

Times are whole numbers or Fractions, so every `==` below is between rationals.
"""

from fractions import Fraction
from functools import cache

import pytest

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Schedule, parse_action, peak_live, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make
from visualize.schedule import bubble_rate

SIZES = (1, 2, 3, 5, 8)
MICROBATCHES = (1, 2, 3, 5, 6, 8, 16)
EQUAL = Durations(1, 1, 1)
UNEQUAL = Durations(Fraction(3, 2), Fraction(5, 3), Fraction(3, 4))
LARGE_W = Durations(2, 1, 5)
CASES = [(name, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev")]
CASES += [("interleaved-1f1b", v) for v in (1, 2, 3)]

made = cache(make)


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


@pytest.mark.parametrize("name, v", CASES)
def test_every_schedule_passes_the_checker(name, v):
    for p, m in grid(name):
        schedule = made(name, p, m, v)
        check(schedule)
        per_rank = 2 if name in ("zbv", "dualpipev") else v or 1
        assert (len(schedule.ranks), schedule.stages, schedule.microbatches) == (p, p * per_rank, m)
        homes = list(schedule.home.values())
        assert [homes.count(r) for r in range(p)] == [per_rank] * p


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
    """Equal stages give ((p-1)/v) / (m + (p-1)/v) of the total, (p-1)/(vm) of the ideal time, as Megatron prints it."""
    for v in (1, 2, 3):
        for p, m in grid("interleaved-1f1b", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)):
            found = timeline("interleaved-1f1b", p, m, v, durations).bubble_fraction
            assert found == Fraction(p - 1, v) / (m + Fraction(p - 1, v))
            assert found / (1 - found) == Fraction(p - 1, v * m)


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


@pytest.mark.parametrize("name", PEAKS)
def test_peak_activations(name):
    for p, m in grid(name):
        assert timeline(name, p, m).peak_activations == [PEAKS[name](p, m, r) for r in range(p)]


def test_peak_activations_of_stages_that_are_parts_of_a_rank():
    for p, m in grid("zbv"):
        peaks = timeline("zbv", p, m).peak_activations
        assert max(peaks) == min(2 * m, 2 * p)  # halves: 1F1B's p
        if m >= 2 * p - 1:
            assert peaks == [2 * p] * p  # and every rank the same, which 1F1B's are not
    for p, m in grid("dualpipev"):
        assert timeline("dualpipev", p, m).peak_activations == [2 * p + 1] * p
    for v in (1, 2, 3):
        for p, m in grid("interleaved-1f1b"):
            expected = [min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p)]
            assert timeline("interleaved-1f1b", p, m, v).peak_activations == expected


def test_weight_gradients_wait_only_where_they_are_put_off():
    def waiting(name, p, m):
        return [peak_live(actions, made_by=("I",), freed_by=("W",)) for actions in made(name, p, m).ranks]

    for p, m in grid("zb-h1"):
        assert waiting("1f1b", p, m) == [0] * p
        assert waiting("zb-h1", p, m) == [min(m, r + 1) for r in range(p)]
        assert waiting("zb-h2", p, m) == [min(m, 2 * r + 1) for r in range(p)]


F_I_W = [(1, 1, 1), (3, 4, 2), (4, 2, 3), (Fraction(3, 2), Fraction(5, 3), Fraction(3, 4))]


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
                assert bubble_rate(h1) == (p - 1) * (f + i - w) / Fraction((p - 1) * (f + i - w) + m * (f + i + w))
            if m >= 2 * p - 1:
                assert idle(h2) == [(p - 1 - r) * (f + i - 2 * w) for r in range(p)]


def test_equal_times_leave_zb_h1_a_third_and_zb_h2_zbv_no_bubble():
    for p, m in grid("zbv"):
        if m >= 2 * p - 1:
            assert 3 * max(idle(timeline("zb-h1", p, m))) == max(idle(timeline("1f1b", p, m)))
            assert idle(timeline("zb-h2", p, m)) == idle(timeline("zbv", p, m)) == [0] * p
            assert bubble_rate(timeline("zbv", p, m)) == 0
            # Not even the start is lost as it is in ZB-H2: the ranks begin one half-sized forward after another.
            assert timeline("zbv", p, m).makespan == 6 * m + p - 1


def test_dualpipevs_bubble_is_the_papers():
    """(p-1)(F&B + B - 3W) on all ranks, where F&B = F + B (arXiv 2412.19437, Table 2; its PP is 2p)."""
    for p, m in [*grid("dualpipev"), (8, 32)]:
        line = timeline("dualpipev", p, m)
        bubbles = [line.makespan - sum(slot.end - slot.start for slot in row) for row in line.ranks]
        assert bubbles == [2 * (p - 1)] * p


def test_a_pair_takes_the_times_of_its_halves():
    pair = parse_action("(0F1;1B0)OVERLAP_F_B")
    assert Durations(1, 1, 1).of(pair) == 3
    assert Durations(table={(0, "F"): 5, (1, "B"): 9}).of(pair) == 14


def test_the_first_row_of_zero_bubbles_tables():
    """arXiv 2401.10241, Tables 5 and 6: p = 8, m = 24."""
    durations = Durations(18.522, 18.086, 9.337, 0.601)
    found = [round(bubble_rate(timeline(name, 8, 24, None, durations)), 4) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert found == [0.2431, 0.1585, 0.1083]


def test_the_bubble_rate_is_the_costliest_ranks():
    mirrored = Schedule.of("mirrored", made("zb-h1", 4, 8).ranks[::-1])
    assert bubble_rate(simulate(mirrored)) == bubble_rate(timeline("zb-h1", 4, 8)) == Fraction(3, 27)


def test_a_message_takes_time_between_ranks_and_none_within():
    slow = Durations(1, 1, 1, 10)
    assert simulate(made("1f1b", 1, 3), slow).makespan == 9
    assert simulate(made("gpipe", 2, 1), slow).makespan == 1 + 10 + 1 + 2 + 10 + 2
    # zbv: stages 1 and 2 are both on rank 1, and 3 is on rank 0, where the backward turns. Rank 1 does 2W0 before 1I0.
    assert simulate(made("zbv", 2, 1), slow).makespan == (1 + 10 + 2 + 10 + 2) + 10 + 3 + 10 + 2


@pytest.mark.parametrize(
    ("name", "sizes", "value"),
    [("2f2b", (2, 2), "2f2b"), ("dualpipev", (4, 7), r"2\*4 = 8"), ("interleaved-1f1b", (4, 6, 2), "6/4")],
)
def test_names_and_sizes_that_do_not_fit_are_refused(name, sizes, value):
    with pytest.raises(UsageError, match=value):
        make(name, *sizes)
