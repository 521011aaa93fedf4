"""Two other places for a list's receives than those of `lower`: as early as a sender is known, and as late as possible.

Both sides of each message are in the lists of all of these, and the computations have the same order.
"""

from collections import deque

from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.check import message_of


def early_receives(schedule: Schedule) -> Schedule:
    """Add each SEND and its RECV when the result is made, where a rank's turn is one computation, however long.

    The ranks take turns, and each does the next computation of its list if it can. So a receive can stand before many
    computations that are done before its message is sent: as in PyTorch's `_add_send_recv`.
    """
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    left = [deque(actions) for actions in schedule.ranks]
    done: set[Action] = set()
    while any(left):
        for rank, actions in enumerate(left):
            if not actions or any(need not in done for need in schedule.needs(actions[0])):
                continue
            action = actions.popleft()
            lists[rank].append(action)
            for result in action.halves:
                done.add(result)
                message = message_of(schedule, result)
                if message is not None:
                    send, receive = message
                    lists[rank].append(send)
                    lists[schedule.home[receive.stage]].append(receive)
    return Schedule.of(schedule.name, lists)


def late_receives(schedule: Schedule) -> Schedule:
    """Add each SEND after the result is made, and each RECV before the computation that uses it."""
    lists = []
    for rank, actions in enumerate(schedule.ranks):
        row: list[Action] = []
        for action in actions:
            for need in schedule.needs(action):
                message = message_of(schedule, need)
                if message is not None and schedule.home[need.stage] != rank:
                    row.append(message[1])
            row.append(action)
            messages = [message_of(schedule, result) for result in action.halves]
            row += [message[0] for message in messages if message is not None]
        lists.append(row)
    return Schedule.of(schedule.name, lists)
