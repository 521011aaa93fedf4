"""The simulator with channels that deliver in order: messages wait for one another, too.

A channel moves one message at a time. `channel` says what has one at each rank:

    rank         the rank, for all that it sends and receives (NB: PyTorch's pipelines over NCCL)
    pair         each other rank, for what is sent to it and received from it
    direction    each other rank twice, for what is sent to it, and for what is received from it (NB: MPI)

A message is posted at each end when the rank's list comes to it, after the computations before it.
It moves when it is the first of its channel at both ends, and takes `comm` there. Meanwhile the
ranks compute: a rank waits only for the messages that its next computation uses.
"""

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, Schedule, Slot, Timeline

# What must not be, for each kind of channel: one per rank deadlocks exactly where blocking sends do.
CHANNELS = {
    "rank": "if sends block until they are received, as with one channel per rank",
    "pair": "with one channel per pair of ranks",
    "direction": "with one channel per direction between two ranks",
}
_USED = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}  # the message that a computation uses


@dataclass(frozen=True)
class Order:
    """Two actions of a rank's list, of which the later one waits for the earlier one; `place` says where."""

    place: str
    earlier: Action
    later: Action


def simulate_in_order(schedule: Schedule, durations: Durations, channel: str) -> Timeline:
    """Run a schedule that has its messages (`lower` adds them), and return the times of all actions.

    A schedule's time is its longest path. UsageError for a circle: it names the actions that wait
    for one another, with their ranks and channels.
    """
    if channel not in CHANNELS:
        raise UsageError(f"channels in order: {channel!r}: choose from {', '.join(CHANNELS)}")
    if len(schedule.ranks) > 1 and all(action.computes for _, action in schedule):
        raise UsageError(f"schedule {schedule.name} has no messages: lower(schedule) adds them")
    waits = _waits(schedule, channel)
    slots: dict[Action, Slot] = {}
    try:
        for event in TopologicalSorter(waits).static_order():
            start = max((slots[other].end for other in waits[event]), default=0)
            time = durations.of(event) if event.computes else durations.comm
            slots[event] = Slot(event, start, start + time)
    except CycleError as error:
        circle = [waits[after][before] for before, after in pairwise(error.args[1])]
        problem = f"deadlocks {CHANNELS[channel]}: {_describe(circle)}"
        raise UsageError(f"schedule {schedule.name} {problem}") from None
    ranks = [[slots[action] for action in actions if action.computes] for actions in schedule.ranks]
    messages = [slot for slot in slots.values() if not slot.action.computes]
    return Timeline(schedule, tuple(tuple(row) for row in ranks), durations.comm, tuple(messages))


def _waits(schedule: Schedule, channel: str) -> dict[Action, dict[Action, Order]]:
    """Return for each event those that it waits for, and the order in a list that makes it wait.

    Events are the computations and the messages. Both ends of a message are one event, its SEND.
    """
    received = {action for _, action in schedule if action.kind in ("RECV_F", "RECV_B")}
    waits: dict[Action, dict[Action, Order]] = {}
    for rank, actions in enumerate(schedule.ranks):
        computed: Action | None = None  # the last computation so far
        moved: dict[str, Action] = {}  # the last message so far of each channel
        for action in actions:
            orders = [Order(f"rank {rank}", computed, action)] if computed is not None else []
            if action.computes:
                computed = action
            else:
                place = _place(schedule, rank, action, channel)
                if place in moved:
                    orders.append(Order(place, moved[place], action))
                moved[place] = action
            for half in action.halves:
                receive = Action(half.stage, _USED.get(half.kind, ""), half.microbatch)
                if receive in received:
                    orders.append(Order(f"rank {rank}", receive, action))
            waits.setdefault(_event(action), {}).update((_event(order.earlier), order) for order in orders)
    return waits


def _event(action: Action) -> Action:
    return action.other_end if action.kind in ("RECV_F", "RECV_B") else action


def _place(schedule: Schedule, rank: int, message: Action, channel: str) -> str:
    """Name the channel of a message at one of its ends."""
    if channel == "rank":
        return f"rank {rank}"
    peer = schedule.home[message.other_end.stage]
    if channel == "pair":
        return f"rank {rank}'s channel with rank {peer}"
    way = "to" if message.kind in ("SEND_F", "SEND_B") else "from"
    return f"rank {rank}'s channel {way} rank {peer}"


def _describe(circle: list[Order]) -> str:
    """Name the actions that wait for one another, a pair for each place on the way."""
    lines = []
    for place, orders in groupby(circle, key=lambda order: order.place):
        stretch = list(orders)
        lines.append(f"{place} has {stretch[0].earlier} before {stretch[-1].later}")
    return ", ".join(lines)
