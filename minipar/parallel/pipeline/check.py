"""The messages of a schedule, and the checker, which finds the mistakes of handwritten pipelines before they run.

`lower` adds a SEND and a RECV for each result that another rank needs. It takes them in the order of a simulation, the
SEND and its RECV at the same moment. Such lists cannot deadlock even if sends block: both ranks of the earliest message
that is not sent yet come to it.
"""

from collections import Counter, deque
from dataclasses import dataclass

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule, peak_live, simulate


def message_of(schedule: Schedule, need: Action, user: Action) -> tuple[Action, Action] | None:
    """Return the (SEND, RECV) that carries the result of `need` to `user`, or None if both are on one rank."""
    if schedule.home[need.stage] == schedule.home[user.stage]:
        return None
    direction = "F" if user.kind == "F" else "B"
    send = Action(need.stage, f"SEND_{direction}", need.microbatch)
    return send, Action(user.stage, f"RECV_{direction}", user.microbatch)


def lower(schedule: Schedule) -> Schedule:
    """Return the schedule with its messages; one that has messages already is returned as it is."""
    if any(not action.computes for _, action in schedule):
        return schedule
    users: dict[Action, list[Action]] = {}
    for _, action in schedule:
        for need in schedule.needs(action):
            users.setdefault(need, []).append(action)
    # (time, is_start, rank, action): at one time the messages of what has ended come before what starts.
    slots = [(rank, slot) for rank, row in enumerate(simulate(schedule).ranks) for slot in row]
    events = [(slot.start, 1, rank, slot.action) for rank, slot in slots]
    events += [(slot.end, 0, rank, slot.action) for rank, slot in slots]
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, is_start, rank, action in sorted(events):
        if is_start:
            lists[rank].append(action)
        for result, user in ((half, user) for half in action.halves for user in users.get(half, []) if not is_start):
            if (message := message_of(schedule, result, user)) is not None:
                lists[rank].append(message[0])
                lists[schedule.home[user.stage]].append(message[1])
    return Schedule.of(schedule.name, lists)


@dataclass(frozen=True)
class Report:
    """The memory and the messages of a schedule that passed. Each list has an entry for each rank."""

    peak_activations: list[int]  # the most forwards, of one stage each, without their backward
    peak_weight_gradients: list[int]  # the most I without their W
    sends: list[int]


def check(schedule: Schedule) -> Report:
    """Return what the schedule holds and sends. UsageError names the first wrong action and its rank."""
    _check_complete(schedule)
    _check_order(schedule)
    simulate(schedule)  # refuses ranks that wait for one another
    lowered = lower(schedule)
    _check_blocking_sends(lowered)
    return Report(
        peak_activations=[peak_live(actions) for actions in schedule.ranks],
        peak_weight_gradients=[peak_live(actions, made_by=("I",), freed_by=("W",)) for actions in schedule.ranks],
        sends=[sum(action.kind.startswith("SEND") for action in actions) for actions in lowered.ranks],
    )


def _error(schedule: Schedule, rank: int, action: Action, problem: str) -> UsageError:
    return UsageError(f"schedule {schedule.name}, rank {rank}, {action}: {problem}")


def _check_complete(schedule: Schedule) -> None:
    """Check that every stage is on one rank, with one F and one backward (B, or I and W) for each microbatch."""
    count = Counter(action for _, action in schedule)
    for rank, actions in enumerate(schedule.ranks):
        if not any(action.computes for action in actions):
            raise UsageError(f"schedule {schedule.name}, rank {rank}: it computes nothing")
    for rank, action in schedule:
        if count[action] > 1:
            raise _error(schedule, rank, action, f"done {count[action]} times")
        if schedule.home[action.stage] != rank:
            raise _error(schedule, rank, action, f"stage {action.stage} is on rank {schedule.home[action.stage]} too")
    for stage in range(schedule.stages):
        if stage not in schedule.home:
            raise UsageError(f"schedule {schedule.name}: no rank has stage {stage} of {schedule.stages}")
        for microbatch in range(schedule.microbatches):
            kinds = {kind for kind in COMPUTE if Action(stage, kind, microbatch) in count}
            needed = "FIW" if kinds & {"I", "W"} else "FB"
            if kinds != set(needed):
                missing = [Action(stage, kind, microbatch) for kind in needed if kind not in kinds]
                problem = "both B and I or W" if kinds - set(needed) else f"{missing[0]} is missing"
                where = f"rank {schedule.home[stage]}, stage {stage}, microbatch {microbatch}"
                raise UsageError(f"schedule {schedule.name}, {where}: {problem}")


def _check_order(schedule: Schedule) -> None:
    """Check that each result is made before it is used; if the lists have messages, each of these too.

    A result is sent after it is made and received before it is used, and nothing else is sent.
    """
    position = {half: i for actions in schedule.ranks for i, action in enumerate(actions) for half in action.halves}
    has_messages = any(not action.computes for action in position)
    expected: set[tuple[Action, int]] = set()  # each message and its rank
    for rank, action in schedule:
        for need in schedule.needs(action) if action.computes else []:
            source, message = schedule.home[need.stage], message_of(schedule, need, action)
            if message is None and position[need] > position[action]:
                raise _error(schedule, rank, action, f"comes before {need}, whose result it needs")
            if message is None or not has_messages:
                continue
            send, receive = message
            for half, where in ((send, source), (receive, rank)):
                expected.add((half, where))
                if half not in position:
                    problem = f"needs {need} from rank {source}, but rank {where} has no {half}"
                    raise _error(schedule, rank, action, problem)
            if position[send] < position[need]:
                raise _error(schedule, source, send, f"comes before {need}, whose result it sends")
            if position[receive] > position[action]:
                raise _error(schedule, rank, receive, f"comes after {action}, which needs it")
    for rank, action in schedule:
        if not action.computes and (action, rank) not in expected:
            raise _error(schedule, rank, action, "no computation needs this message")


def _check_blocking_sends(schedule: Schedule) -> None:
    """Run the lists with sends that block until they are received (MPI's Ssend); refuse a deadlock."""
    left = [deque(actions) for actions in schedule.ranks]
    progress = True
    while progress:
        progress = False
        for row in left:
            while row and not row[0].kind.startswith("RECV"):
                if not row[0].computes:  # a send and its receive are done together
                    peer = left[schedule.home[row[0].other_end.stage]]
                    if not peer or peer[0] != row[0].other_end:
                        break
                    peer.popleft()
                row.popleft()  # what a computation needs comes before it in the lists: the checks above have seen that
                progress = True
    waiting = ", ".join(f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions)
    if waiting:
        raise UsageError(f"schedule {schedule.name} deadlocks if sends block until they are received: {waiting}")
