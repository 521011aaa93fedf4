"""Claims about the checker, the messages and the CSV: what cannot run is refused before anything runs, rank and action
named; what can run is not; PyTorch's format goes in and out.
"""

import random
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from schedule_cases import random_schedule, schedule

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedules import make
from visualize.schedule_file import load_csv, save_csv, splits_backward

SOME = [
    *[(name, p, m, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv")
      for p, m in ((1, 3), (2, 5), (4, 8), (5, 3))],
    *[("interleaved-1f1b", p, m, v) for p, m, v in ((1, 2, 2), (2, 4, 3), (4, 8, 2))],
]  # fmt: skip

ONE_F_ONE_B = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
A, B = WITH_MESSAGES = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
)
PAIR = "(1F1;1B0)OVERLAP_F_B"
WITH_A_PAIR = (ONE_F_ONE_B[0], f"1F0 {PAIR} 1B1")
PAIR_AND_MESSAGES = (A, f"1RECV_F0 1F0 1RECV_F1 {PAIR} 1SEND_B0 1B1 1SEND_B1")
# What is wrong: the lists, and the ranks and actions that the refusal shows.
BROKEN = {
    "no F": (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1"], "rank 1", "1F1"),
    "no B": (["0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "rank 0", "0B0"),
    "B three times": (["0F0 0B0", "1F0 1B0 1B0 1B0"], "rank 1", "1B0", "3"),
    "B, I and W": (["0F0 0B0", "1F0 1I0 1W0 1B0"], "rank 1", "B and I or W"),
    "B before F": (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"], "rank 1", "1B1", "1F1"),
    "W before I": (["0F0 0I0 0W0", "1F0 1W0 1I0"], "rank 1", "1W0", "1I0"),
    "B before the stage after": (["0F0 1F0 0B0 1B0"], "rank 0", "0B0", "1B0"),
    "a stage on two ranks": (["0F0 0B0 1F1 1B1 0F1 0B1", "1F0 1B0"], "rank 0", "rank 1", "1F1"),
    "a stage on none": (["0F0 0B0", "2F0 2B0"], "stage 1"),
    "ranks that wait for each other": (
        ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"], "rank 0", "0B1", "rank 1", "1B0", "rank 2", "2F1"),
    "no receive": ([A, B.replace("1RECV_F1 ", "")], "rank 1", "1F1", "0F1", "1RECV_F1"),
    "no send": ([A.replace("0SEND_F1 ", ""), B], "rank 1", "1F1", "0SEND_F1"),
    "sent before it is there": ([A.replace("0F1 0SEND_F1", "0SEND_F1 0F1"), B], "rank 0", "0SEND_F1", "0F1"),
    "received after its use": ([A, B.replace("1RECV_F0 1F0", "1F0 1RECV_F0")], "rank 1", "1RECV_F0", "1F0"),
    "a message to nobody": ([A + " 0SEND_B0", B], "rank 0", "0SEND_B0"),
    "a message within a rank": (["0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"], "rank 0", "0SEND_F0"),
    "sent twice": ([A + " 0SEND_F0", B], "rank 0", "0SEND_F0", "2"),
    "half of a pair twice": (["0F0 0F1 0B0 0B1", f"1F0 1B0 {PAIR} 1B1"], "rank 1", "1B0", "2"),
    "no half of a pair": (["0F0 0F1 0B0", f"1F0 {PAIR}"], "rank 0", "0B1"),
    "a pair's B before its F": (["0F0 0F1 0B0 0B1", f"{PAIR} 1F0 1B1"], "rank 1", "1B0", "1F0"),
    "a pair that needs itself": (
        ["0F0 0F1 0B0 0B1", "1F0 1B0 (1F1;1B1)OVERLAP_F_B"], "rank 1", "(1F1;1B1)OVERLAP_F_B"),
    "a pair whose halves wait for each other": (  # both halves begin when both have their input
        ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1F1 1B0 1B1"], "rank 0", "(0F1;0B0)OVERLAP_F_B", "rank 1", "1F1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_list_is_refused_with_its_rank_and_action(fault):
    rows, *values = BROKEN[fault]
    with pytest.raises(UsageError) as refused:
        check(schedule(*rows))
    assert [value for value in ("mine", *values) if value not in str(refused.value)] == []


def test_the_lists_that_were_broken_are_accepted_whole():
    for rows in (ONE_F_ONE_B, WITH_MESSAGES, WITH_A_PAIR, PAIR_AND_MESSAGES):
        mine = schedule(*rows)
        check(mine)
        peaks = [2, 1 + (rows[1].count("OVERLAP"))]  # the pair's F begins while the activation of its B is alive
        assert simulate(mine).peak_activations == peaks
    check(schedule("0F0 0I0 0W0 0F1 0B1"))  # B here, I and W there: allowed


@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)))
def test_lowering_adds_each_message_once_and_nothing_else(case):
    original = make(*case)
    whole = lower(original)
    assert [[a for a in row if a.computes] for row in whole.ranks] == [list(row) for row in original.ranks]
    p, m, stages = case[1], case[2], original.stages
    cuts = sum(original.home[s] != original.home[s + 1] for s in range(stages - 1))
    assert cuts == (0 if p == 1 else stages - 1 - (case[0] in ("zbv", "dualpipev")))
    kinds = Counter(action.kind for _, action in whole if not action.computes)
    assert all(kinds[kind] == cuts * m for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
    check(whole)  # the rendezvous too
    if cuts:
        assert lower(whole) is whole


def test_a_schedule_that_has_messages_is_left_as_it_is():
    for rows in (WITH_MESSAGES, BROKEN["no send"][0]):  # what is broken is refused, not mended
        mine = schedule(*rows)
        assert lower(mine) is mine


# -- against a brute-force execution ---------------------------------------------------------------------------------


def never_ends(edges):
    """Whether the events, each after those it needs, cannot all happen: another method than the checker's."""
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError:
        return True
    return False


def waits(mine, event=lambda action: action):
    """event -> the events it waits for: the one before it on its rank, and the computations it needs."""
    edges = {}
    for row in mine.ranks:
        before = None
        for action in row:
            needed = edges.setdefault(event(action), set())
            needed |= {before} - {None, event(action)}
            if action.computes:
                needed |= set(map(event, mine.needs(action)))
            before = event(action)
    return edges


def message(action):
    """A send and its receive are one event: both sides are there, or neither goes on."""
    if action.computes:
        return action
    step = {"SEND_F": 0, "RECV_F": -1, "SEND_B": 0, "RECV_B": 1}[action.kind]
    return action.stage + step, action.kind[-1], action.microbatch


def refuses(mine):
    try:
        check(mine)
    except UsageError as error:
        assert "never ends" in str(error)  # and no other complaint
        return True
    return False


def test_orders_are_refused_exactly_when_an_execution_gets_stuck():
    rng = random.Random(2)
    found = Counter()
    for _ in range(120):
        mine = random_schedule(rng, consistent=False)
        stuck = never_ends(waits(mine))
        assert refuses(mine) == stuck
        found[stuck] += 1
        if not stuck:
            whole = lower(mine)
            assert not refuses(whole) and not never_ends(waits(whole, message))
    assert min(found.values()) > 15, found


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_the_csv_is_pytorchs_a_row_per_rank_a_cell_per_step(tmp_path):
    def text(mine):
        save_csv(mine, tmp_path / "a.csv")
        return (tmp_path / "a.csv").read_text()

    assert text(make("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
    assert text(make("gpipe", 3, 1)) == "0F0,,,,,0B0\n,1F0,,,1B0\n,,2F0,2B0\n"
    assert text(make("zb-h1", 2, 2)) == "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
    assert text(make("zbv", 1, 1)) == "0F0,1F0,1I0,1W0,0I0,0W0\n"
    assert text(make("dualpipev", 1, 2)) == "0F0,1F0,0F1,1B0,,(1F1;0B0)OVERLAP_F_B,,,1B1,,0I1,0W1\n"
    assert text(schedule(*WITH_MESSAGES)) == "".join(row.replace(" ", ",") + "\n" for row in WITH_MESSAGES)


@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)))
def test_every_schedule_comes_back_from_its_csv(case, tmp_path):
    for mine in (make(*case), lower(make(*case))):
        path = tmp_path / "elsewhere.csv"
        save_csv(mine, path)
        back = load_csv(path)
        assert back.ranks == mine.ranks and back.name == "elsewhere"
        check(back)
    save_csv(make(*case), path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for row, slots in zip(rows, simulate(make(*case)).ranks, strict=True):  # F, I, W one step each, and B
        if splits_backward(mine):  # of B and a pair the first of their steps
            assert [i for i, cell in enumerate(row) if cell] == [slot.start for slot in slots]


@pytest.mark.parametrize(
    "cell", ["2X0", "F0", "0f0", "-1F0", "0F0.5", "0RECV_W0", "(0F0;0B0)", "(0B0;0F0)OVERLAP_F_B", "(0F0)OVERLAP_F_B"]
)
def test_an_unknown_action_is_named_with_its_rank_and_cell(cell, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"0F0,0B0\n,1F0,{cell},1B0\n")
    with pytest.raises(UsageError) as refused:
        load_csv(path)
    assert all(value in str(refused.value) for value in (str(path), "rank 1", "cell 3", repr(cell)))


def test_a_file_that_cannot_be_read_or_holds_nothing_is_named(tmp_path):
    with pytest.raises(UsageError, match="missing.csv"):
        load_csv(tmp_path / "missing.csv")
    with pytest.raises(UsageError, match=tmp_path.name):
        load_csv(tmp_path)
    path = tmp_path / "a.csv"
    for content in (b"", b",,\n,\n", b"\x89PNG\r\n\xff", b"0F0," + b"x" * 200_000):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="a.csv"):
            load_csv(path)
