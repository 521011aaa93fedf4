"""The checker: whether a schedule can run at all, before anything does.

What it looks for is what goes wrong in hand-written pipelines: an action missing or done twice, a backward before its
forward, a result that nobody sends, a message that nobody takes, ranks that wait for one another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Schedule
from minipar.parallel.pipeline.lower import lower, message_of
from minipar.parallel.pipeline.simulate import peak_live, simulate


@dataclass(frozen=True)
class Report:
    """What a schedule that passed will hold and send. Lists have an entry for each rank."""

    peak_activations: list[int]  # forwards, of one stage each, whose backward is still to come
    peak_weight_gradients: list[int]  # I done whose W is still to come
    sends: list[int]


def check(schedule: Schedule) -> Report:
    """UsageError names the first action at fault and its rank; else what the schedule holds and sends."""
    _complete(schedule)
    _in_order(schedule)
    simulate(schedule)  # refuses a cycle
    whole = lower(schedule)
    _messages(whole)
    _no_deadlock(whole)
    weights = [
        peak_live(
            [Action(a.stage, {"I": "F", "W": "B"}[a.kind], a.microbatch) for a in actions if a.kind in ("I", "W")]
        )
        for actions in schedule.ranks
    ]
    sends = [sum(action.kind.startswith("SEND") for action in actions) for actions in whole.ranks]
    return Report([peak_live(actions) for actions in schedule.ranks], weights, sends)


def _fault(schedule: Schedule, rank: int, action: Action, what: str) -> UsageError:
    return UsageError(f"schedule {schedule.name}, rank {rank}, {action}: {what}")


def _complete(schedule: Schedule) -> None:
    """Every stage on one rank; for each microbatch one F and one backward, whole or as I and W."""
    count = Counter(action for _, action in schedule)
    for rank, actions in enumerate(schedule.ranks):
        if not any(action.computes for action in actions):
            raise UsageError(f"schedule {schedule.name}, rank {rank}: it computes nothing")
    for rank, action in schedule:
        if count[action] > 1:
            raise _fault(schedule, rank, action, f"done {count[action]} times")
        if schedule.home[action.stage] != rank:
            raise _fault(schedule, rank, action, f"stage {action.stage} is on rank {schedule.home[action.stage]} too")
    for stage in range(schedule.stages):
        if stage not in schedule.home:
            raise UsageError(f"schedule {schedule.name}: no rank has stage {stage} of {schedule.stages}")
        for microbatch in range(schedule.microbatches):
            has = {kind for kind in ("F", "B", "I", "W") if Action(stage, kind, microbatch) in count}
            if has not in ({"F", "B"}, {"F", "I", "W"}):
                missing = Action(
                    stage, "F" if "F" not in has else "I" if "W" in has else "W" if "I" in has else "B", microbatch
                )
                what = "B beside I or W" if "B" in has and has & {"I", "W"} else f"{missing} is missing"
                where = f"rank {schedule.home[stage]}, stage {stage}, microbatch {microbatch}"
                raise UsageError(f"schedule {schedule.name}, {where}: {what}")


def _in_order(schedule: Schedule) -> None:
    """On a rank, forward before backward and I before W."""
    for rank, actions in enumerate(schedule.ranks):
        place = {action: i for i, action in enumerate(actions)}
        for action in actions:
            if not action.computes:
                continue
            for need in schedule.needs(action):
                if schedule.home[need.stage] == rank and place[need] > place[action]:
                    raise _fault(schedule, rank, action, f"comes before {need}, whose result it needs")


def _messages(schedule: Schedule) -> None:
    """Each result needed elsewhere is sent after it is made and received before it is used, and nothing else is."""
    place = {action: i for actions in schedule.ranks for i, action in enumerate(actions)}
    wanted: dict[Action, tuple[Action, int]] = {}
    for rank, action in schedule:
        if not action.computes:
            continue
        for need in schedule.needs(action):
            message = message_of(schedule, need, action)
            if message is None:
                continue
            send, receive = message
            other = schedule.home[need.stage]
            for half, where in ((send, other), (receive, rank)):
                wanted[half] = action, where
                if half not in place:
                    raise _fault(
                        schedule, rank, action, f"needs {need} from rank {other}, but rank {where} has no {half}"
                    )
            if place[send] < place[need]:
                raise _fault(schedule, other, send, f"comes before {need}, whose result it sends")
            if place[receive] > place[action]:
                raise _fault(schedule, rank, receive, f"comes after {action}, which needs it")
    for rank, action in schedule:
        if not action.computes and (action not in wanted or wanted[action][1] != rank):
            raise _fault(schedule, rank, action, "no computation needs this message")


def _no_deadlock(schedule: Schedule) -> None:
    """Run the lists with sends that block until they are received (MPI's Ssend)."""
    at = [0] * len(schedule.ranks)
    done: set[Action] = set()

    def front(rank: int) -> Action | None:
        return schedule.ranks[rank][at[rank]] if at[rank] < len(schedule.ranks[rank]) else None

    def finish(rank: int, action: Action) -> None:
        done.add(action)
        at[rank] += 1

    moved = True
    while moved:
        moved = False
        for rank in range(len(at)):
            action = front(rank)
            if action is None:
                continue
            if action.computes:
                if all(need in done for need in schedule.needs(action)):
                    finish(rank, action)
                    moved = True
                continue
            if action.kind.startswith("SEND"):
                step = 1 if action.kind == "SEND_F" else -1
                receive = Action(action.stage + step, action.kind.replace("SEND", "RECV"), action.microbatch)
                other = schedule.home[receive.stage]
                if front(other) == receive:
                    finish(rank, action)
                    finish(other, receive)
                    moved = True
    waiting = [f"rank {rank} at {front(rank)}" for rank in range(len(at)) if front(rank) is not None]
    if waiting:
        raise UsageError(
            f"schedule {schedule.name} deadlocks if sends block until they are received: {', '.join(waiting)}"
        )
