"""The messages of a schedule, and the checker, which finds mistakes in schedules before they run.

`lower` adds a SEND and a RECV for each result that another rank needs. It takes them in the order
of a simulation, the SEND and its RECV at the same moment. Such lists cannot deadlock even if sends
block: both ranks of the earliest message that is not sent yet come to it.
"""

from collections import Counter

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import COMPUTE, Action, Schedule, simulate


def message_of(schedule: Schedule, result: Action) -> tuple[Action, Action] | None:
    """Return the (SEND, RECV) of a computation's result, or None if no other rank needs it.

    The next stage needs the result of F, and the stage before that of B or I.
    """
    if result.kind == "W":
        return None
    direction = "F" if result.kind == "F" else "B"
    send = Action(result.stage, f"SEND_{direction}", result.microbatch)
    receive = send.other_end
    here = schedule.home[send.stage]
    if schedule.home.get(receive.stage, here) == here:
        return None
    return send, receive


def lower(schedule: Schedule) -> Schedule:
    """Return the schedule with its messages; one that has messages already is returned as it is.

    Both results of a pair are sent after it. `lower(schedule.unpaired())` has F's message between
    F and B instead.
    """
    if any(not action.computes for _, action in schedule):
        return schedule
    events = []
    for rank, row in enumerate(simulate(schedule).ranks):
        for slot in row:
            events.append((slot.start, "start", rank, slot.action))
            events.append((slot.end, "end", rank, slot.action))
    lists: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, event, rank, action in sorted(events):  # what ends comes before what starts at that time
        if event == "start":
            lists[rank].append(action)
            continue
        for result in action.halves:
            message = message_of(schedule, result)
            if message is not None:
                send, receive = message
                lists[rank].append(send)
                lists[schedule.home[receive.stage]].append(receive)
    return Schedule.of(schedule.name, lists)


def check(schedule: Schedule) -> None:
    """Check that the schedule can run. UsageError names the first wrong action and its rank.

    Lists that pass do not deadlock if a message is received by its tag, as over MPI.
    """
    _check_complete(schedule)
    _check_order(schedule)
    simulate(schedule)  # refuses ranks that wait for one another


def _error(schedule: Schedule, rank: int, action: Action, problem: str) -> UsageError:
    return UsageError(f"schedule {schedule.name}, rank {rank}, {action}: {problem}")


def _check_complete(schedule: Schedule) -> None:
    """Check that each stage is on one rank, with one F and one backward for each microbatch."""
    count = Counter(action for _, action in schedule)
    for rank, actions in enumerate(schedule.ranks):
        if not any(action.computes for action in actions):
            raise UsageError(f"schedule {schedule.name}, rank {rank}: it computes nothing")
    for rank, action in schedule:
        if count[action] > 1:
            raise _error(schedule, rank, action, f"done {count[action]} times")
        home = schedule.home[action.stage]
        if home != rank:
            raise _error(schedule, rank, action, f"stage {action.stage} is on rank {home} too")
    for stage in range(schedule.stages):
        if stage not in schedule.home:
            raise UsageError(f"schedule {schedule.name}: no rank has stage {stage} of {schedule.stages}")
        for microbatch in range(schedule.microbatches):
            kinds = {kind for kind in COMPUTE if Action(stage, kind, microbatch) in count}
            problem = _problem(stage, microbatch, kinds)
            if problem:
                where = f"rank {schedule.home[stage]}, stage {stage}, microbatch {microbatch}"
                raise UsageError(f"schedule {schedule.name}, {where}: {problem}")


def _problem(stage: int, microbatch: int, kinds: set[str]) -> str:
    """Return what is wrong with these computations of one microbatch in one stage, "" if nothing is."""
    is_split = "I" in kinds or "W" in kinds
    if is_split and "B" in kinds:
        return "both B and I or W"
    for kind in ("F", "I", "W") if is_split else ("F", "B"):
        if kind not in kinds:
            return f"{Action(stage, kind, microbatch)} is missing"
    return ""


def _check_order(schedule: Schedule) -> None:
    """Check that each result is made before it is used; if the lists have messages, each of these too.

    A result is sent after it is made and received before it is used, and nothing else is sent.
    """
    position: dict[Action, int] = {}
    for actions in schedule.ranks:
        for i, action in enumerate(actions):
            position.update(dict.fromkeys(action.halves, i))
    has_messages = any(not action.computes for action in position)
    expected: set[tuple[Action, int]] = set()  # both ends of each message, with their ranks
    for rank, action in schedule:
        if not action.computes:
            continue
        for need in schedule.needs(action):
            if schedule.home[need.stage] == rank:
                if position[need] > position[action]:
                    raise _error(schedule, rank, action, f"comes before {need}, whose result it needs")
            elif has_messages:
                expected.update(_check_message(schedule, position, need, action))
    for rank, action in schedule:
        if not action.computes and (action, rank) not in expected:
            raise _error(schedule, rank, action, "no computation needs this message")


def _check_message(
    schedule: Schedule, position: dict[Action, int], need: Action, user: Action
) -> list[tuple[Action, int]]:
    """Check the message from a result to its user on another rank; return its ends with their ranks."""
    message = message_of(schedule, need)
    assert message is not None
    send, receive = message
    source = schedule.home[need.stage]
    rank = schedule.home[user.stage]
    ends = [(send, source), (receive, rank)]
    for end, where in ends:
        if end not in position:
            problem = f"needs {need} from rank {source}, but rank {where} has no {end}"
            raise _error(schedule, rank, user, problem)
    if position[send] < position[need]:
        raise _error(schedule, source, send, f"comes before {need}, whose result it sends")
    if position[receive] > position[user]:
        raise _error(schedule, rank, receive, f"comes after {user}, which needs it")
    return ends
