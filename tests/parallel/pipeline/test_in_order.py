"""Claims about channels that deliver in order: the simulator's verdict and times are those of an execution message by
message, over threads too; receives that stand too early cost time, and those that stand too late deadlock.
"""

import random
from collections import Counter, deque
from fractions import Fraction

import pytest
from launcher import ROOT, run_mpi
from one_at_a_time import OneAtATime, walk
from pipeline_cases import differing, execute_rank, one_device
from schedule_cases import random_schedule, schedule, shuffle_messages

from chapters.support.ch08.receives import early_receives, late_receives
from minipar.comm import run_local
from minipar.errors import CommunicationError, UsageError
from minipar.parallel.pipeline.actions import Action, Durations, simulate
from minipar.parallel.pipeline.check import check, lower
from minipar.parallel.pipeline.in_order import CHANNELS, simulate_in_order
from minipar.parallel.pipeline.schedules import SCHEDULES, make

by_channel = pytest.mark.parametrize("channel", CHANNELS)
SEND_FIRST = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)
SWAPPED = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1")


def deadlocks(mine, channel):
    try:
        check(mine, channel)
    except UsageError as error:
        assert f"deadlocks {CHANNELS[channel]}: rank " in str(error)
        return True
    return False


def cost(mine, channel, durations=Durations()):  # noqa: B008
    """The time that the channels add to the step."""
    return simulate_in_order(mine, durations, channel).makespan - simulate(mine, durations).makespan


# ---- deadlocks -------------------------------------------------------------------------------------------------------


A_LIST_TOO = (  # rank 0 has no result to send before it has received one
    "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
)


@pytest.mark.parametrize(
    ("rows", "channel", "problem"),
    [
        (
            SEND_FIRST,
            "rank",
            "if sends block until they are received, as with one channel per rank: "
            "rank 0 has 0SEND_F1 before 0RECV_B0, rank 1 has 1SEND_B0 before 1RECV_F1",
        ),
        (
            SEND_FIRST,
            "pair",
            "with one channel per pair of ranks: rank 0's channel with rank 1 has 0SEND_F1 before 0RECV_B0, "
            "rank 1's channel with rank 0 has 1SEND_B0 before 1RECV_F1",
        ),
        (
            SWAPPED,
            "direction",
            "with one channel per direction between two ranks: rank 0's channel to rank 1 has 0SEND_F0 before "
            "0SEND_F1, rank 1's channel from rank 0 has 1RECV_F1 before 1RECV_F0",
        ),
        (
            A_LIST_TOO,
            "direction",
            "with one channel per direction between two ranks: rank 1 has 1RECV_F1 before 1SEND_B0, "
            "rank 0 has 0RECV_B0 before 0SEND_F1",
        ),
    ],
    ids=["sends first", "sends first, pair", "another order", "computations"],
)
def test_a_deadlock_names_ranks_actions_and_channels(rows, channel, problem):
    with pytest.raises(UsageError) as refused:
        check(schedule(*rows), channel)
    assert str(refused.value) == f"schedule mine deadlocks {problem}"


def test_sends_that_face_each_other_pass_in_two_directions():
    mine = schedule(*SEND_FIRST)
    assert [deadlocks(mine, channel) for channel in CHANNELS] == [True, True, False]
    assert check(mine, "direction").peak_activations == [2, 1]
    assert simulate_in_order(mine, Durations(), "direction").makespan == 9


def test_receives_in_another_order_deadlock_on_every_channel():
    assert all(deadlocks(schedule(*SWAPPED), channel) for channel in CHANNELS)


def test_other_channels_and_lists_without_messages_are_refused():
    with pytest.raises(UsageError, match="channels in order: 'link': choose from rank, pair, direction"):
        check(make("1f1b", 2, 2), "link")
    with pytest.raises(UsageError, match=r"1f1b has no messages: lower\(schedule\) adds them"):
        simulate_in_order(make("1f1b", 2, 2), Durations(), "rank")
    assert simulate_in_order(make("1f1b", 1, 2), Durations(), "rank").makespan == 6


# ---- minipar's own schedules -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_lower_costs_nothing_if_messages_take_no_time(name):
    """With F = I = W, whose order `lower` takes."""
    for p, m in ((1, 2), (2, 4), (3, 6), (4, 8), (5, 15), (8, 16)):
        mine = lower(make(name, p, m))
        for channel in CHANNELS:
            assert cost(mine, channel) == 0


# p = 4, m = 8, the times 4, 5, 3 of F, I and W: the step without channels, what those of a rank, a pair and a direction
# add with messages that take no time, and the same with messages that take 1.
COSTS = {
    "naive": (384, [0, 0, 0], 432, [0, 0, 0]),
    "gpipe": (132, [0, 0, 0], 138, [23, 14, 14]),
    "1f1b": (132, [0, 0, 0], 148, [9, 7, 2]),
    "interleaved-1f1b": (228, [0, 0, 0], 242, [53, 13, 3]),
    "zb-h1": (114, [0, 0, 0], 126, [7, 5, 3]),
    "zb-h2": (108, [0, 0, 0], 111, [12, 9, 4]),
    "zbv": (207, [2, 0, 0], 220, [19, 7, 3]),
    "dualpipev": (222, [0, 0, 0], 243, [23, 21, 10]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_channels_cost_if_messages_take_time(name):
    found = []
    mine = lower(make(name, 4, 8))
    for comm in (0, 1):
        durations = Durations(4, 5, 3, comm)
        found += [simulate(mine, durations).makespan, [cost(mine, channel, durations) for channel in CHANNELS]]
    assert tuple(found) == COSTS[name]


def test_early_receives_idle_behind_one_channel_per_rank():
    """Interleaved 1F1B on 8 ranks: a step takes 168 in the place of 117 (pytorch pull request 165664, issue 188833)."""
    mine = early_receives(make("interleaved-1f1b", 8, 16))
    row = [str(action) for action in mine.ranks[0]]
    # The list of the pull request. 8RECV_F0 waits for rank 7, and 0SEND_F1, which is ready, waits behind it.
    assert " ".join(row[:9]) == "0F0 0SEND_F0 8RECV_F0 0F1 0SEND_F1 8RECV_F1 0F2 0SEND_F2 8RECV_F2"
    assert simulate(mine).makespan == 117
    assert [cost(mine, channel) for channel in CHANNELS] == [51, 0, 0]
    assert [cost(lower(make("interleaved-1f1b", 8, 16)), channel) for channel in CHANNELS] == [0, 0, 0]


def test_late_receives_deadlock_where_both_sides_send_first():
    found = {name: [deadlocks(late_receives(make(name, 4, 8)), each) for each in CHANNELS] for name in SCHEDULES}
    never, two_ways, always = [False] * 3, [True, True, False], [True] * 3
    assert found.pop("naive") == found.pop("gpipe") == never
    assert (
        found.pop("zbv") == found.pop("dualpipev") == always
    )  # a rank has two stages in the order of the other's ends
    assert all(verdict == two_ways for verdict in found.values())


# ---- against an execution --------------------------------------------------------------------------------------------


def step_by_step(mine, durations, channel):
    """The time of each computation's end; those that never come to an end are missing.

    A message is posted in the queues of both its ends, and leaves them when it is the first of both.
    """
    left = [deque(row) for row in mine.ranks]
    free = [0] * len(left)  # when each rank has computed what it has begun
    queues, posted, idle_since, ends = {}, {}, {}, {}

    def queue(rank, action):
        peer = mine.home[action.other_end.stage]
        return {"rank": (rank,), "pair": (rank, peer), "direction": (rank, peer, action.kind[:4])}[channel]

    def compute(rank):
        while left[rank]:
            action = left[rank][0]
            arrivals = [0]
            if not action.computes:
                queues.setdefault(queue(rank, action), deque()).append(action)
                posted[action] = free[rank]
            for half in action.halves:
                receive = Action(
                    half.stage, {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(half.kind), half.microbatch
                )
                if receive in posted:
                    if receive not in ends:
                        return
                    arrivals.append(ends[receive])
            left[rank].popleft()
            if action.computes:
                free[rank] = ends[action] = max(free[rank], *arrivals) + durations.of(action)

    def move():
        for key, waiting in queues.items():
            first = waiting[0] if waiting else None
            if first is not None and first.kind.startswith("SEND"):
                other = queue(mine.home[first.other_end.stage], first.other_end)
                if queues.get(other) and queues[other][0] == first.other_end:
                    start = max(
                        posted[first], posted[first.other_end], idle_since.get(key, 0), idle_since.get(other, 0)
                    )
                    for each, place in ((first, key), (first.other_end, other)):
                        queues[place].popleft()
                        ends[each] = idle_since[place] = start + durations.comm
                    return True
        return False

    for rank in range(len(left)):
        compute(rank)
    while move():
        for rank in range(len(left)):
            compute(rank)
    return {action: end for action, end in ends.items() if action.computes}


def random_lists(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        mine = random_schedule(rng, consistent=True)
        yield rng, (shuffle_messages(rng, mine) if rng.random() < 0.7 else early_receives(mine))


@by_channel
def test_verdicts_and_times_are_those_of_an_execution(channel):
    found = Counter()
    for rng, mine in random_lists(5, 150):
        durations = Durations(
            *(Fraction(rng.randint(1, 9), 2) for _ in range(3)), comm=rng.choice((0, 1, Fraction(5, 2)))
        )
        ends = step_by_step(mine, durations, channel)
        stuck = len(ends) < sum(action.computes for _, action in mine)
        assert deadlocks(mine, channel) == stuck
        found[stuck] += 1
        if not stuck:
            line = simulate_in_order(mine, durations, channel)
            assert {slot.action: slot.end for row in line.ranks for slot in row} == ends
            assert line.makespan >= simulate(mine, durations).makespan
    assert min(found.values()) > 15, found


def test_a_finer_channel_deadlocks_less():
    found = Counter()
    for _, mine in random_lists(6, 200):
        verdicts = [deadlocks(mine, channel) for channel in CHANNELS]
        assert verdicts == sorted(verdicts, reverse=True)
        found[sum(verdicts)] += 1
    for name in SCHEDULES:
        found[sum(deadlocks(late_receives(make(name, 2, 4)), channel) for channel in CHANNELS)] += 1
    assert set(found) == {0, 2, 3}, found


@by_channel
def test_ranks_over_threads_get_stuck_as_the_simulator_says(channel):
    found = Counter()
    for _, mine in random_lists(7, 40):
        stuck = deadlocks(mine, channel)
        found[stuck] += 1
        if stuck:
            with pytest.raises(CommunicationError, match="every rank waits"):
                run_local(len(mine.ranks), lambda comm, mine=mine: walk(OneAtATime(comm, channel), mine))
        else:
            run_local(len(mine.ranks), lambda comm, mine=mine: walk(OneAtATime(comm, channel), mine))
    assert min(found.values()) > 5, found


# ---- the executor ----------------------------------------------------------------------------------------------------


def execute_in_order(mine, channel, tags=True):
    """A step of training over threads, whose channels move one message at a time."""
    return run_local(len(mine.ranks), lambda comm: execute_rank(OneAtATime(comm, channel, tags), mine, 5))


@by_channel
@pytest.mark.parametrize("place", [lower, early_receives, late_receives])
def test_the_executor_ends_or_hangs_as_the_simulator_says(place, channel):
    mine = place(make("1f1b", 3, 4))
    assert deadlocks(mine, channel) == (place is late_receives and channel != "direction")
    if deadlocks(mine, channel):
        with pytest.raises(CommunicationError, match="every rank waits and no message is on its way"):
            execute_in_order(mine, channel)
    else:
        assert differing(execute_in_order(mine, channel), one_device(5, 4)) == []


def test_without_tags_a_swapped_receive_takes_another_message():
    """Equal tags match by order: nothing hangs, and microbatches change places."""
    mine = schedule(*SWAPPED)
    sorted_lists = lower(make("1f1b", 2, 2))
    assert differing(execute_in_order(sorted_lists, "direction", tags=False), one_device(5, 2)) == []
    assert differing(execute_in_order(mine, "direction", tags=False), one_device(5, 2)) != []


MPI_PROGRAM = """
import sys
from one_at_a_time import OneAtATime, walk
from schedule_cases import schedule
from minipar.comm import world

walk(OneAtATime(world(), sys.argv[3]), schedule(*sys.argv[1:3]), int(sys.argv[4]))
print("ended")
"""


@pytest.mark.long
def test_over_mpi_the_deadline_ends_what_the_simulator_refuses(tmp_path):
    """If messages are large: MPI copies small ones aside, so that a toy model passes."""
    program = tmp_path / "step.py"
    program.write_text(MPI_PROGRAM)
    env = {"MINIPAR_TIMEOUT": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}"}
    for channel, elements in (("pair", 1 << 17), ("direction", 1 << 17), ("pair", 1)):
        job = run_mpi(2, [str(program), *SEND_FIRST, channel, str(elements)], env=env)
        if deadlocks(schedule(*SEND_FIRST), channel) and elements > 1:
            assert job.returncode and ": nothing for 1 s" in job.stderr and "ended" not in job.stdout
        else:
            assert job.stdout.count("ended") == 2, job.stderr
