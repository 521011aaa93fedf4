"""Grader of exercise 27, 1F1B in 71 steps?"""

from itertools import permutations, product

from chapters.exercises.e27_71_steps import claim
from chapters.exercises.grading import Hint, call, require
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Action, Durations, Schedule, simulate
from minipar.parallel.pipeline.schedules import make

UNEQUAL = (
    ([1, 1], [2, 2], 2),
    ([1, 3], [1, 4], 2),
    ([5, 1], [4, 1], 2),
    ([1, 4, 1], [2, 3, 1], 2),
    ([2, 1, 3], [1] * 3, 1),
)
SOLVED = "71 steps break a rule, and your bound says why no order of the actions gets below it (section 7.3)."


def timetable_of(p, m):
    """Return the timetable of 1F1B, F and B of one step each."""
    line = simulate(make("1f1b", p, m), Durations(1, 1, 0))
    return [[(slot.start, f"{slot.action.kind}{slot.action.microbatch}") for slot in row] for row in line.ranks]


def moved(timetable, rank, action, start):
    """Return the timetable with another start of one action."""
    return [
        sorted((start if (r, name) == (rank, action) else when, name) for when, name in row)
        for r, row in enumerate(timetable)
    ]


def timetables():
    """Yield a name, a timetable and the right answer."""
    yield "the claim", claim(), (7, 0, "B0")
    yield "1F1B with p = 8 and m = 32, which takes 78 steps", timetable_of(8, 32), None
    yield "one rank", timetable_of(1, 3), None
    yield "F before F of the rank before has ended", moved(timetable_of(3, 4), 1, "F0", 0), (0, 1, "F0")
    last = [[(0, "F0"), (5, "B0")], [(1, "B0"), (2, "F0")]]
    yield "B before F on the last rank", last, (1, 1, "B0")
    yield (
        "B on the rank before begins when B begins, not when it has ended",
        [[(0, "F0"), (2, "B0")], [(1, "F0"), (2, "B0")]],
        (2, 0, "B0"),
    )
    twice = [[(0, "F0"), (2, "F1"), (3, "B0"), (4, "B1")], [(1, "F0"), (2, "B0"), (3, "F1"), (4, "B1")]]
    yield "rank 0 has B1 one step too early", twice, (4, 0, "B1")
    yield (
        "two actions at a time",
        [[(0, "F0"), (0, "F1"), (3, "B0"), (5, "B1")], [(1, "F0"), (2, "B0"), (3, "F1"), (4, "B1")]],
        (0, 0, "F1"),
    )
    both = moved(moved(timetable_of(4, 4), 3, "F1", 4), 0, "B3", 10)
    yield "two mistakes, of which the first in time is on rank 3", both, (4, 3, "F1")


def fastest(forward, backward, m):
    """Return the time of the best schedule with one stage per rank: try every order of every rank."""
    p = len(forward)
    times = {(r, kind): times[r] for r in range(p) for kind, times in (("F", forward), ("B", backward))}
    orders = set()
    for order in permutations([("F", i) for i in range(m)] + [("B", i) for i in range(m)]):
        if all(order.index(("F", i)) < order.index(("B", i)) for i in range(m)):
            orders.add(order)
    best = None
    for choice in product(sorted(orders), repeat=p):
        lists = [[Action(r, kind, i) for kind, i in order] for r, order in enumerate(choice)]
        try:
            time = simulate(Schedule.of("", lists), Durations(table=times)).makespan
        except UsageError:  # the ranks wait for one another
            continue
        best = time if best is None else min(best, time)
    return best


def bound(forward, backward, m):
    """Return the reference's bound: the way down to a rank, its work, and the way up."""
    return max(sum(forward[:r]) + m * (forward[r] + backward[r]) + sum(backward[:r]) for r in range(len(forward)))


def grade(solution):
    for what, timetable, right in timetables():
        found = call(solution, solution.first_broken, [list(row) for row in timetable])
        if found == right:
            continue
        reason = ""
        if right is None:
            reason = ": it breaks no rule; what ends at a time has ended when another action begins then"
        elif found is None:
            reason = ": it breaks a rule; ask each action for all three"
        elif isinstance(found, tuple) and len(found) == 3:
            reason = ": an earlier one breaks a rule" if found[:2] > right[:2] else ": this one breaks no rule"
        raise Hint(f"{what}: first_broken returns {found}, expected {right}{reason}")
    for p, m, f, b in ((4, 8, 1, 2), (8, 32, 1, 1), (1, 5, 1, 2), (4, 2, 4, 5), (5, 1, 1, 3)):
        where = f"p = {p}, m = {m}, F {f}, B {b} on all ranks"
        right, found = (m + p - 1) * (f + b), call(solution, solution.least_time, [f] * p, [b] * p, m)
        wrong = {
            m * (f + b): ": this is the work of one rank; the last one cannot begin at once",
            m * (f + b) + (p - 1) * f: ": when the last rank is done, the last gradient has still to go up",
            m * (f + b) + (p - 1) * b: ": the first microbatch has to come down to the last rank before it can begin",
            (m + p) * (f + b): ": a rank need not wait for itself",
        }
        require(found == right, f"{where}: {found}, expected {right}{wrong.get(found, '')}")
    for forward, backward, m in UNEQUAL:
        where = f"F {forward}, B {backward}, m = {m}"
        found, best = (
            call(solution, solution.least_time, list(forward), list(backward), m),
            fastest(forward, backward, m),
        )
        require(found <= best, f"{where}: no schedule is to beat {found}, but one takes {best}")
        least = bound(forward, backward, m)
        require(
            found >= least,
            f"{where}: {found}, but none is faster than {least}: the slowest rank need not be the last; ask each rank, "
            "and take the largest answer",
        )
