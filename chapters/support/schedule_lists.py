"""The functions of chapter 7 that work on lists of actions, and what `I` and `W` add to them, for chapter 8.

`as_text`, `library_lists`, `timed`, `idle`, `longest_path` and `written` are those of chapter 7 (a test compares
them). `needs` and `run_list` know `I` and `W` too, the two halves of a backward.
"""

from itertools import chain, pairwise

import numpy as np

from minipar.parallel.pipeline.actions import Schedule, parse_action
from minipar.parallel.pipeline.check import lower
from minipar.parallel.pipeline.schedules import make


def as_text(actions):
    return " ".join(f"{s}{kind}{i}" for kind, i, s in actions)


def library_lists(name, p, m):
    lists = []
    for actions in make(name, p, m).ranks:
        lists.append([(action.kind, action.microbatch, action.stage) for action in actions])
    return lists


def needs(kind, i, s, last):
    """The actions whose results this one uses; `last` is the last stage."""
    if kind == "F":
        return [("F", i, s - 1)] if s > 0 else []
    if kind == "W":
        return [("I", i, s)]
    return [("F", i, s)] + ([(kind, i, s + 1)] if s < last else [])  # B or I


def timed(lists, times):
    """The (start, end) of each action; times[kind] is the time of an action, and messages take none."""
    last = max(s for _, _, s in chain(*lists))
    slots = {}
    free = [0] * len(lists)  # when each rank has done what it has begun
    todo = [list(actions) for actions in lists]
    while any(todo):
        done = len(slots)
        for r, actions in enumerate(todo):
            while actions and all(need in slots for need in needs(*actions[0], last)):
                action = actions.pop(0)
                start = free[r]
                for need in needs(*action, last):
                    _, arrival = slots[need]
                    start = max(start, arrival)
                free[r] = start + times[action[0]]
                slots[action] = (start, free[r])
        assert len(slots) > done, "the ranks wait in a circle"
    return slots


def idle(lists, times):
    """The time from the first action to the last, less the work of a rank, which is the same for each."""
    total = max(end for _, end in timed(lists, times).values())
    work = sum(times[kind] for kind, _, _ in lists[0])
    return total - work


def longest_path(lists, slots):
    """The chain that ends with the last action, and in which each action begins when the one before it ends."""
    last = max(s for _, _, s in slots)
    before = {}  # for each action the one before it on the same rank
    for actions in lists:
        before |= {after: action for action, after in pairwise(actions)}
    path = [max(slots, key=lambda action: slots[action][1])]
    start, _ = slots[path[0]]
    while start > 0:
        waited_for = [before.get(path[0]), *needs(*path[0], last)]
        path.insert(0, next(action for action in waited_for if action in slots and slots[action][1] == start))
        start, _ = slots[path[0]]
    return path


def written(*lists):
    """A schedule from text, one string per rank."""
    parsed = []
    for actions in lists:
        parsed.append([parse_action(action) for action in actions.split()])
    return Schedule.of("by hand", parsed)


def count_sends(schedule):
    """The messages that each rank sends."""
    return [sum(action.kind in ("SEND_F", "SEND_B") for action in actions) for actions in lower(schedule).ranks]


def run_list(pipe, lists, weights, batch):
    """Do this rank's list. Return the gradient of its weight, added over all microbatches in their order."""
    r = pipe.rank
    m = len(batch)
    x, y, dy = {}, {}, {}  # by microbatch
    sent = []
    weight = weights[r]
    d_weight = np.zeros_like(weight)
    for kind, i, _ in lists[r]:
        if kind == "F":
            x[i] = batch[i] if r == 0 else pipe.irecv(np.empty_like(batch[0]), r - 1, i).wait()
            y[i] = np.tanh(x[i] @ weight)
            if r < pipe.size - 1:
                sent.append(pipe.isend(y[i], r + 1, i))
        if kind in "BI":
            is_last = r == pipe.size - 1
            gradient = y[i] if is_last else pipe.irecv(np.empty_like(batch[0]), r + 1, m + i).wait()
            dy[i] = gradient * (1 - y[i] ** 2)
            if r > 0:
                sent.append(pipe.isend(dy[i] @ weight.T, r - 1, m + i))
        if kind in "BW":
            d_weight += x.pop(i).T @ dy.pop(i)
    for message in sent:
        message.wait()
    return d_weight
