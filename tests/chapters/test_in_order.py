"""Claims about channels that deliver in order: the simulator's verdict and times are those of an execution message by
message; receives that stand too early cost time.
"""

import random
from collections import Counter, deque
from fractions import Fraction

import pytest
from schedule_cases import random_schedule, schedule, shuffle_messages

from chapters.support.ch08.in_order import CHANNELS, simulate_in_order
from chapters.support.ch08.receives import early_receives
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, simulate
from minipar.parallel.pipeline.check import lower
from minipar.parallel.pipeline.schedules import SCHEDULES, make

by_channel = pytest.mark.parametrize("channel", CHANNELS)
SEND_FIRST = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)
SWAPPED = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1")


def deadlocks(mine, channel):
    try:
        simulate_in_order(mine, Durations(), channel)
    except UsageError:
        return True
    return False


def cost(mine, channel, durations=Durations()):  # noqa: B008
    """The time that the channels add to the step."""
    return simulate_in_order(mine, durations, channel).makespan - simulate(mine, durations).makespan


# ---- deadlocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "channel", "values"),
    [
        (SEND_FIRST, "rank", "0SEND_F1 0RECV_B0 1SEND_B0 1RECV_F1"),
        (SEND_FIRST, "pair", "0SEND_F1 0RECV_B0 1SEND_B0 1RECV_F1"),
        (SWAPPED, "direction", "0SEND_F0 0SEND_F1 1RECV_F1 1RECV_F0"),
    ],
)
def test_a_deadlock_names_ranks_and_actions(rows, channel, values):
    with pytest.raises(UsageError) as refused:
        simulate_in_order(schedule(*rows), Durations(), channel)
    assert all(value in str(refused.value) for value in ("rank 0", "rank 1", *values.split()))


# ---- minipar's own schedules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_lower_costs_nothing_if_messages_take_no_time(name):
    """With F = I = W, whose order `lower` takes."""
    for p, m in ((1, 2), (3, 6), (4, 8), (5, 15)):
        mine = lower(make(name, p, m))
        for channel in CHANNELS:
            assert cost(mine, channel) == 0


def test_early_receives_idle_behind_one_channel_per_rank():
    """Interleaved 1F1B on 8 ranks: a step takes 168 in the place of 117 (pytorch pull request 165664, issue 188833)."""
    mine = early_receives(make("interleaved-1f1b", 8, 16))
    row = [str(action) for action in mine.ranks[0]]
    # The list of the pull request. 8RECV_F0 waits for rank 7, and 0SEND_F1, which is ready, waits behind it.
    assert " ".join(row[:9]) == "0F0 0SEND_F0 8RECV_F0 0F1 0SEND_F1 8RECV_F1 0F2 0SEND_F2 8RECV_F2"
    assert simulate(mine).makespan == 117
    assert [cost(mine, channel) for channel in CHANNELS] == [51, 0, 0]
    assert [cost(lower(make("interleaved-1f1b", 8, 16)), channel) for channel in CHANNELS] == [0, 0, 0]


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
    for rng, mine in random_lists(5, 60):
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
    assert min(found.values()) > 5, found
