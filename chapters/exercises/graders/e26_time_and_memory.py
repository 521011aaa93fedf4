"""Grader of exercise 26, a pipeline schedule for a score of time and memory."""

from collections import Counter
from fractions import Fraction

from chapters.exercises.e26_time_and_memory import KNOWN
from chapters.exercises.grading import Hint, call, require
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, Schedule, parse_action, peak_live, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import SCHEDULES, make

P, M = 4, 8
TIMES = (4, 5, 3)  # of F, I and W, of all stages of a rank
SOLVED = "No row of the table is as good in time and in memory (section 8.5)."


def score(schedule):
    """Return the time and the memory of a schedule that has been checked."""
    v = schedule.stages // P
    timeline = simulate(schedule, Durations(*(Fraction(time, v) for time in TIMES)))
    alive = max(peak_live(actions, freed_by=("W", "B")) for actions in schedule.ranks)
    return timeline.makespan, Fraction(alive, v)


def greedy(kinds, alive):
    """Return a schedule with one stage per rank, at most `alive` microbatches on it, and no plan.

    A rank that is free takes the first of `kinds` that it can begin.
    """
    times = {"F": 4, "I": 5, "W": 3, "B": 8}
    ends, begun = {}, [Counter() for _ in range(P)]
    free, lists = [0] * P, [[] for _ in range(P)]
    now = 0
    while min(len(actions) for actions in lists) < M * len(kinds):
        for rank in range(P):
            if free[rank] > now:
                continue
            for kind in kinds:
                i = begun[rank][kind]
                needs = {"F": [(rank - 1, "F")], "W": [(rank, "I")]}.get(kind, [(rank, "F"), (rank + 1, kind)])
                ready = all(ends.get((*need, i), now + 1) <= now for need in needs if 0 <= need[0] < P)
                full = kind == "F" and i - begun[rank]["W" if "W" in kinds else "B"] >= alive
                if i < M and ready and not full:
                    begun[rank][kind] += 1
                    free[rank] = ends[rank, kind, i] = now + times[kind]
                    lists[rank].append(Action(rank, kind, i))
                    break
        now += 1
    return Schedule.of("greedy", lists)


def table():
    """Return the scores of the library's schedules, and of greedy ones that keep less."""
    rows = {name: make(name, P, M) for name in SCHEDULES}
    for alive in (2, 3):
        rows[f"1f1b-{alive}-alive"] = greedy("BF", alive)
        rows[f"ifw-{alive}-alive"] = greedy("IFW", alive)
    return {name: score(schedule) for name, schedule in rows.items()}


def parsed(action, rank):
    """Return the action that a string names. Hint if it names none."""
    require(isinstance(action, str), f"rank {rank}: {action!r} is no action: actions are strings such as '2F0'")
    try:
        return parse_action(action)
    except UsageError:
        expected = "expected stage, kind and microbatch, such as '2F0', of the kinds F, I, W and B"
        raise Hint(f"rank {rank}: unknown action {action!r}: {expected}") from None


def checked(lists):
    """Return the reader's schedule. Hint if it is none."""
    require(isinstance(lists, list) and len(lists) == P, f"return a list of {P} lists, one for each rank")
    for rank, actions in enumerate(lists):
        require(isinstance(actions, list) and actions, f'rank {rank}: expected a list of actions like "0F0"')
    try:
        schedule = Schedule.of("yours", [[parsed(action, rank) for action in lists[rank]] for rank in range(P)])
        for rank, action in schedule:
            require(action.kind in "FBIW", f"rank {rank}, {action}: only F, B, I and W; messages take no time here")
        require(
            schedule.microbatches == M,
            f"the last microbatch is {schedule.microbatches - 1}, expected {M - 1}: there are {M}, from 0 on",
        )
        check(schedule)
    except UsageError as error:
        raise Hint(str(error)) from None
    stages = [len({action.stage for half, action in schedule if half == rank}) for rank in range(P)]
    require(
        len(set(stages)) == 1 and stages[0] <= 3,
        f"the ranks have {stages} stages; each must have the same number, 1, 2 or 3",
    )
    return schedule


def grade(solution):
    return grade_lists(call(solution, solution.schedule))


def grade_lists(lists):
    """Return the score in words. Hint if another schedule is as good in both."""
    time, memory = score(checked(lists))
    rows = table()
    yours = f"time {float(time):g}, memory {float(memory):g}"
    for name, (other, held) in rows.items():
        if other <= time and held <= memory:
            same = (other, held) == (time, memory)
            raise Hint(
                f"{yours}: {name} has time {float(other):g}, memory {float(held):g}, "
                + ("the same score; find a new one" if same else "which is no worse in either; beat it in one of them")
            )
    beaten = [name for name, (other, held) in rows.items() if time <= other and memory <= held]
    known = min((best for held, best in KNOWN.items() if held <= memory), default=None)
    record = "" if known is None else f"; the least time that we know within this memory: {known:g}"
    return f"{yours}; it beats {', '.join(beaten) or 'no row, and none beats it'}{record}"
