"""Claims about the checker, the messages and the CSV: what cannot run is refused before anything runs, rank and action
named; what can run is not; PyTorch's format goes in and out.
"""

import random
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import numpy as np
import pytest
from schedule_cases import random_schedule, schedule, shuffle_messages

from minipar.comm import run_local
from minipar.errors import CommunicationError, UsageError
from minipar.parallel.pipeline.actions import Action, Schedule, parse_action, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.schedule_file import load_csv, save_csv
from minipar.parallel.pipeline.schedules import make

SOME = [
    *[(name, p, m, None) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zbv")
      for p, m in ((1, 1), (1, 3), (2, 1), (2, 5), (3, 2), (4, 8), (5, 3), (8, 4), (8, 16))],
    *[("interleaved-1f1b", p, m, v) for p, m, v in ((1, 2, 2), (2, 2, 1), (2, 4, 3), (3, 6, 2), (4, 8, 2), (8, 8, 3))],
]  # fmt: skip


def from_memory(rows, tmp_path):
    return schedule(*rows)


def from_csv(rows, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("".join(",".join(row.split()) + "\n" for row in rows), encoding="utf-8")
    return load_csv(path)


ONE_F_ONE_B = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
WITH_MESSAGES = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
)
A, B = WITH_MESSAGES
PAIR = "(1F1;1B0)OVERLAP_F_B"
WITH_A_PAIR = (ONE_F_ONE_B[0], f"1F0 {PAIR} 1B1")
PAIR_AND_MESSAGES = (A, f"1RECV_F0 1F0 1RECV_F1 {PAIR} 1SEND_B0 1B1 1SEND_B1")
# What is wrong: the lists, and what the refusal says.
BROKEN = {
    "no F": (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1"], "rank 1, stage 1, microbatch 1: 1F1 is missing"),
    "no B": (["0F0 0F1 0B1", "1F0 1B0 1F1 1B1"], "rank 0, stage 0, microbatch 0: 0B0 is missing"),
    "no I": (["0F0 0I0 0W0", "1F0 1W0"], "rank 1, stage 1, microbatch 0: 1I0 is missing"),
    "no W": (["0F0 0I0", "1F0 1I0 1W0"], "rank 0, stage 0, microbatch 0: 0W0 is missing"),
    "no F, no B": (["0F0 0F1 0B0 0B1", "1F0 1B0"], "rank 1, stage 1, microbatch 1: 1F1 is missing"),
    "F twice": (["0F0 0F0 0B0", "1F0 1B0"], "rank 0, 0F0: done 2 times"),
    "B three times": (["0F0 0B0", "1F0 1B0 1B0 1B0"], "rank 1, 1B0: done 3 times"),
    "on two ranks": (["0F0 0B0 1F0", "1F0 1B0"], "rank 0, 1F0: done 2 times"),
    "B, I and W": (["0F0 0B0", "1F0 1I0 1W0 1B0"], "rank 1, stage 1, microbatch 0: both B and I or W"),
    "B and W": (["0F0 0B0 0W0", "1F0 1B0"], "rank 0, stage 0, microbatch 0: both B and I or W"),
    "B before F": (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"], "rank 1, 1B1: comes before 1F1, whose result it needs"),
    "I before F": (["0I0 0F0 0W0", "1F0 1I0 1W0"], "rank 0, 0I0: comes before 0F0, whose result it needs"),
    "W before I": (["0F0 0I0 0W0", "1F0 1W0 1I0"], "rank 1, 1W0: comes before 1I0, whose result it needs"),
    "F before the stage before": (["1F0 0F0 1B0 0B0"], "rank 0, 1F0: comes before 0F0, whose result it needs"),
    "B before the stage after": (["0F0 1F0 0B0 1B0"], "rank 0, 0B0: comes before 1B0, whose result it needs"),
    "a stage on two ranks": (["0F0 0B0 1F1 1B1 0F1 0B1", "1F0 1B0"], "rank 0, 1F1: stage 1 is on rank 1 too"),
    "a stage on none": (["0F0 0B0", "2F0 2B0"], "no rank has stage 1 of 3"),
    "ranks that wait for each other": (
        ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"],
        "never ends: rank 0 before 0B1, which needs 1B1; rank 1 before 1B0, which needs 2B0; "
        "rank 2 before 2F1, which needs 1F1",
    ),
    "no receive": ([A, B.replace("1RECV_F1 ", "")], "rank 1, 1F1: needs 0F1 from rank 0, but rank 1 has no 1RECV_F1"),
    "no receive of a gradient": (
        [A.replace("0RECV_B0 ", ""), B],
        "rank 0, 0B0: needs 1B0 from rank 1, but rank 0 has no 0RECV_B0",
    ),
    "no send": ([A.replace("0SEND_F1 ", ""), B], "rank 1, 1F1: needs 0F1 from rank 0, but rank 0 has no 0SEND_F1"),
    "no send of a gradient": (
        [A, B.replace(" 1SEND_B1", "")],
        "rank 0, 0B1: needs 1B1 from rank 1, but rank 1 has no 1SEND_B1",
    ),
    "sent before it is there": (
        [A.replace("0F1 0SEND_F1", "0SEND_F1 0F1"), B],
        "rank 0, 0SEND_F1: comes before 0F1, whose result it sends",
    ),
    "a gradient sent before it is there": (
        [A, B.replace("1B0 1SEND_B0", "1SEND_B0 1B0")],
        "rank 1, 1SEND_B0: comes before 1B0, whose result it sends",
    ),
    "received after its use": (
        [A, B.replace("1RECV_F0 1F0", "1F0 1RECV_F0")],
        "rank 1, 1RECV_F0: comes after 1F0, which needs it",
    ),
    "a gradient received after its use": (
        [A.replace("0RECV_B1 0B1", "0B1 0RECV_B1"), B],
        "rank 0, 0RECV_B1: comes after 0B1, which needs it",
    ),
    "a message to nobody": ([A + " 0SEND_B0", B], "rank 0, 0SEND_B0: no computation needs this message"),
    "a message from nobody": ([A, "1RECV_B0 " + B], "rank 1, 1RECV_B0: no computation needs this message"),
    "a message within a rank": (["0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"], "rank 0, 0SEND_F0: no computation needs this"),
    "sent twice": ([A + " 0SEND_F0", B], "rank 0, 0SEND_F0: done 2 times"),
    "sent by another rank": (
        [A.replace("0SEND_F1 ", ""), B + " 0SEND_F1"],
        "rank 1, 0SEND_F1: stage 0 is on rank 0 too",
    ),
    "a pair on two ranks": (
        ["0F0 0F1 0B1", "1F0 1B0 (1F1;0B0)OVERLAP_F_B 1B1"],
        "rank 0, 0F0: stage 0 is on rank 1 too",
    ),
    "half of a pair twice": (["0F0 0F1 0B0 0B1", f"1F0 1B0 {PAIR} 1B1"], "rank 1, 1B0: done 2 times"),
    "no half of a pair": (["0F0 0F1 0B0", f"1F0 {PAIR}"], "rank 0, stage 0, microbatch 1: 0B1 is missing"),
    "a pair's F before its input": (
        [f"0F0 1F0 {PAIR} 0F1 1B1 0B0 0B1"],
        "rank 0, 1F1: comes before 0F1, whose result it needs",
    ),
    "a pair's B before its F": (["0F0 0F1 0B0 0B1", f"{PAIR} 1F0 1B1"], "rank 1, 1B0: comes before 1F0, whose result"),
    "a pair that needs itself": (
        ["0F0 0F1 0B0 0B1", "1F0 1B0 (1F1;1B1)OVERLAP_F_B"],
        "never ends: rank 0 before 0B1, which needs 1B1; rank 1 before (1F1;1B1)OVERLAP_F_B, which needs 1F1",
    ),
    "a pair whose halves wait for each other": (  # both halves begin when both have their input
        ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1F1 1B0 1B1"],
        "never ends: rank 0 before (0F1;0B0)OVERLAP_F_B, which needs 1B0; rank 1 before 1F1, which needs 0F1",
    ),
    "a pair's input received after it": (
        [A, f"1RECV_F0 1F0 {PAIR} 1RECV_F1 1SEND_B0 1B1 1SEND_B1"],
        "rank 1, 1RECV_F1: comes after 1F1, which needs it",
    ),
    "a pair's result sent before it": (
        [A, f"1RECV_F0 1F0 1RECV_F1 1SEND_B0 {PAIR} 1B1 1SEND_B1"],
        "rank 1, 1SEND_B0: comes before 1B0, whose result it sends",
    ),
    # The steady state of 1F1B, written down the obvious way: both neighbours send first.
    "sends that face each other": (
        [A, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"],
        "deadlocks if sends block until they are received, as with one channel per rank: "
        "rank 0 has 0SEND_F1 before 0RECV_B0, rank 1 has 1SEND_B0 before 1RECV_F1",
    ),
    "received in another order than sent": (
        [A, "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"],
        "deadlocks if sends block until they are received, as with one channel per rank: "
        "rank 0 has 0SEND_F0 before 0SEND_F1, rank 1 has 1RECV_F1 before 1RECV_F0",
    ),
}


@pytest.mark.parametrize("source", [from_memory, from_csv])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_list_is_refused_with_its_rank_and_action(fault, source, tmp_path):
    rows, message = BROKEN[fault]
    with pytest.raises(UsageError) as refused:
        check(source(rows, tmp_path))
    assert str(refused.value).startswith("schedule mine") and message in str(refused.value)


@pytest.mark.parametrize("source", [from_memory, from_csv])
def test_the_lists_that_were_broken_are_accepted_whole(source, tmp_path):
    for rows in (ONE_F_ONE_B, WITH_MESSAGES, WITH_A_PAIR, PAIR_AND_MESSAGES):
        report = check(source(rows, tmp_path))
        peaks = [2, 1 + (rows[1].count("OVERLAP"))]  # the pair's F begins while the activation of its B is alive
        assert (report.peak_activations, report.peak_weight_gradients, report.sends) == (peaks, [0, 0], [2, 2])
    assert check(schedule("0F0 0I0 0W0 0F1 0B1")).peak_weight_gradients == [1]  # B here, I and W there: allowed


def test_the_report_counts_what_is_held_and_sent():
    report = check(make("zb-h1", 4, 8))
    assert report.peak_activations == [4, 3, 2, 1] and report.peak_weight_gradients == [1, 2, 3, 4]
    assert report.sends == [8, 16, 16, 8]
    assert check(make("zbv", 4, 8)).sends == [16, 32, 32, 16]  # nothing is sent where the V turns
    assert check(make("interleaved-1f1b", 1, 3, 3)).sends == [0]
    assert check(make("dualpipev", 4, 8)).sends == [16, 32, 32, 16]


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


def test_a_pairs_halves_follow_one_another_on_one_core():
    paired = schedule(*WITH_A_PAIR)
    assert paired.unpaired().ranks == schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1").ranks
    assert paired.unpaired().name == paired.name


def test_a_pairs_forward_is_sent_between_its_halves():
    """After the pair if it stays a pair, before B if its halves are single actions."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"]
    paired = schedule(*rows)
    after = [str(action) for action in lower(paired).ranks[1]]
    between = [str(action) for action in lower(paired.unpaired()).ranks[1]]
    pair = after.index("(1F1;1B0)OVERLAP_F_B")
    assert after[pair + 1 : pair + 3] == ["1SEND_F1", "1SEND_B0"]
    assert between.index("1F1") + 1 == between.index("1SEND_F1") < between.index("1B0")


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


def paired(rng, mine):
    """The same lists with some of the Fs that come right before a B paired with it."""
    rows = []
    for row in mine.ranks:
        rows.append([])
        for action in row:
            if rows[-1] and (rows[-1][-1].kind, action.kind) == ("F", "B") and rng.random() < 0.7:
                action = parse_action(f"({rows[-1].pop()};{action})OVERLAP_F_B")
            rows[-1].append(action)
    return Schedule.of("random", rows)


def refuses(mine):
    try:
        check(mine)
    except UsageError as error:
        assert "never ends" in str(error) or "deadlocks" in str(error)  # and no other complaint
        return True
    return False


def test_orders_that_agree_are_accepted_and_never_deadlock():
    rng = random.Random(1)
    for _ in range(150):
        mine = random_schedule(rng, consistent=True)
        assert not refuses(mine)
        whole = lower(mine)
        assert not refuses(whole) and not never_ends(waits(whole, message))


def test_orders_are_refused_exactly_when_an_execution_gets_stuck():
    rng = random.Random(2)
    found = Counter()
    for _ in range(300):
        mine = random_schedule(rng, consistent=False)
        stuck = never_ends(waits(mine))
        assert refuses(mine) == stuck
        found[stuck] += 1
    assert min(found.values()) > 40, found


def test_pairs_are_refused_exactly_when_an_execution_gets_stuck():
    """A pair is one event, which waits for what either half needs."""
    rng = random.Random(6)
    found = Counter()
    for _ in range(400):
        mine = paired(rng, random_schedule(rng, consistent=True))
        whole = {half: action for row in mine.ranks for action in row for half in action.halves}
        stuck = never_ends(waits(mine, lambda action, whole=whole: whole.get(action, action)))
        assert refuses(mine) == stuck
        found[stuck, any(action.pair for action in whole.values())] += 1
    assert min(found[stuck, True] for stuck in (True, False)) > 40, found


def test_messages_are_refused_when_blocking_sends_get_stuck():
    rng = random.Random(3)
    found = Counter()
    for _ in range(300):
        mine = shuffle_messages(rng, random_schedule(rng, consistent=True))
        stuck = never_ends(waits(mine, message))
        assert refuses(mine) == stuck
        found[stuck] += 1
    assert min(found.values()) > 40, found


def test_ranks_that_really_block_get_stuck_as_the_checker_says():
    """Over threads, where a send is done only when it has been received."""
    rng = random.Random(4)
    found = Counter()
    for _ in range(60):
        mine = shuffle_messages(rng, random_schedule(rng, consistent=True))

        def rank(comm, mine=mine):
            for action in mine.ranks[comm.rank]:
                if not action.computes:
                    verb, way = action.kind.split("_")
                    other = action.stage + (1 if (verb == "SEND") == (way == "F") else -1)
                    tag = 100 * min(action.stage, other) + 10 * (way == "B") + action.microbatch
                    move = comm.isend if verb == "SEND" else comm.irecv
                    move(np.zeros(1), mine.home[other], tag).wait()

        stuck = refuses(mine)
        found[stuck] += 1
        if stuck:
            with pytest.raises(CommunicationError, match="every rank waits"):
                run_local(len(mine.ranks), rank)
        else:
            run_local(len(mine.ranks), rank)
    assert min(found.values()) > 10, found


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)))
def test_every_schedule_comes_back_from_its_csv(case, tmp_path):
    for mine in (make(*case), lower(make(*case))):
        path = tmp_path / "elsewhere.csv"
        save_csv(mine, path)
        back = load_csv(path)
        assert back.ranks == mine.ranks and back.name == "elsewhere"
        assert check(back) == check(mine)
    save_csv(make(*case), path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for row, slots in zip(rows, simulate(make(*case)).ranks, strict=True):  # F, I, W one step each, and B
        if make(*case).splits_backward:  # of B and a pair the first of their steps
            assert [i for i, cell in enumerate(row) if cell] == [slot.start for slot in slots]


def test_spaces_quotes_and_windows_line_ends_do_not_matter(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b' 0F0 ,0F1, ,"0B0",,0B1\r\n,1F0,1B0,1F1,1B1,,,\r\n')
    assert load_csv(path).ranks == make("1f1b", 2, 2).ranks


@pytest.mark.parametrize(
    "cell",
    [
        "2X0",
        "F0",
        "0F",
        "0f0",
        "-1F0",
        "0F-1",
        "0F0.5",
        "0 F 0",
        "0SEND0",
        "0RECV_W0",
        "0F0;0B0",
        "hello",
        "(0F0;0B0)",
        "(0F0;0I0)OVERLAP_F_B",
        "(0B0;0F0)OVERLAP_F_B",
        "(0F0)OVERLAP_F_B",
        "(0F0;0B0;0F1)OVERLAP_F_B",
        "(0F0;0B0;)OVERLAP_F_B",
        "OVERLAP_F_B",
        "0OVERLAP_F_B0",
    ],
)
def test_an_unknown_action_is_named_with_its_rank_and_cell(cell, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"0F0,0B0\n,1F0,{cell},1B0\n")
    with pytest.raises(UsageError) as refused:
        load_csv(path)
    assert f"{path}, rank 1, cell 3: unknown action {cell!r}: expected stage, kind, microbatch" in str(refused.value)


def test_a_long_cell_is_not_repeated_in_the_error(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("x" * 10_000)
    with pytest.raises(UsageError) as refused:
        load_csv(path)
    assert len(str(refused.value)) < 1000


def test_a_file_that_cannot_be_read_or_holds_nothing_is_named(tmp_path):
    with pytest.raises(UsageError, match="missing.csv cannot be read: No such file"):
        load_csv(tmp_path / "missing.csv")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_csv(tmp_path)
    path = tmp_path / "a.csv"
    for content in (b"", b"\n", b",,\n,\n", b"  ,  \n"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="a.csv holds no actions"):
            load_csv(path)
    path.write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(UsageError, match="a.csv cannot be read: .*can't decode"):
        load_csv(path)
    path.write_bytes(b"0F0," + b"x" * 200_000)
    with pytest.raises(UsageError, match="a.csv cannot be read: field larger"):
        load_csv(path)


def test_actions_read_as_they_are_written():
    for kind in ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        action = Action(12, kind, 345)
        assert str(action) == f"12{kind}345" and parse_action(str(action)) == action
        assert action.computes == (len(kind) == 1) and action.halves == (action,)
    pair = Action(0, "OVERLAP_F_B", 5, (Action(0, "F", 5), Action(7, "B", 1)))
    assert str(pair) == "(0F5;7B1)OVERLAP_F_B" and parse_action(" (0F5;7B1)OVERLAP_F_B ") == pair
    assert pair.computes and pair.halves == pair.pair


def test_the_work_of_the_checks_is_linear_in_the_ranks(monkeypatch):
    """One microbatch comes back over all ranks: a rank is looked at when a result or a message is there for it."""
    needs, other_end = Schedule.needs, Action.other_end.fget
    looks = Counter()

    def count_needs(self, action):
        looks["needs"] += 1
        return needs(self, action)

    def count_ends(self):
        looks["ends"] += 1
        return other_end(self)

    monkeypatch.setattr(Schedule, "needs", count_needs)
    monkeypatch.setattr(Action, "other_end", property(count_ends))
    counts = []
    for ranks in (50, 200):
        looks.clear()
        check(schedule(*(f"{rank}F0 {rank}B0" for rank in range(ranks))))
        counts.append(Counter(looks))
    assert all(counts[1][name] <= 4.2 * counts[0][name] for name in ("needs", "ends")), counts
