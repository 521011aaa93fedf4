"""Grader of exercise 11, a schedule that beats 1F1B under its memory."""

from chapters.exercises.graders.schedules import timeline_of
from chapters.exercises.grading import Hint, call, require
from minipar.parallel.pipeline.actions import peak_live

SIZES = ((2, 2), (2, 6), (3, 5), (4, 4), (4, 8), (8, 8), (8, 24))
SOLVED = "Weight gradients fill a part of the bubble: less than 3m + 2(p - 1), in the memory of 1F1B (section 8.3)."


def grade(solution):
    for p, m in SIZES:
        grade_lists(call(solution, solution.schedule, p, m), p, m)


def grade_lists(lists, p, m):
    """Raise a Hint unless these lists are faster than 1F1B in its memory."""
    for rank, actions in enumerate(lists or ()):
        places = {action: place for place, action in enumerate(actions)}
        for i in range(m):
            order = [places.get(f"{kind}{i}", -1) for kind in "FIW"]
            if -1 not in order and order[2] < order[1]:
                raise Hint(f"p = {p}, m = {m}: rank {rank} runs W{i} before I{i}, which makes what it needs")
    timeline = timeline_of(lists, p, m, "FIW")
    limit = min(m, p)
    for rank, actions in enumerate(timeline.schedule.ranks):
        alive = peak_live(actions, freed_by=("W",))
        require(
            alive <= limit,
            f"p = {p}, m = {m}: {alive} microbatches are alive on rank {rank} from F to W, at most {limit}: "
            "run a waiting W before the forward that would be one too many",
        )
    bound = 3 * m + 2 * (p - 1)
    pairs = all(actions.index(f"W{i}") == actions.index(f"I{i}") + 1 for actions in lists for i in range(m))
    reason = (
        "every W stands right behind its I; move some to where the rank waits"
        if pairs
        else "let the I that others wait for go first, and a W run where a rank would wait"
    )
    require(
        timeline.makespan < bound,
        f"p = {p}, m = {m}: it takes {timeline.makespan}, and must take less than {bound}: {reason}",
    )
