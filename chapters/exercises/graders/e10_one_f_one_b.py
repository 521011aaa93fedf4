"""Grader of exercise 10, 1F1B as lists."""

from chapters.exercises.graders.schedules import timeline_of
from chapters.exercises.grading import call, require

SIZES = ((1, 1), (1, 4), (2, 1), (2, 5), (3, 7), (4, 2), (4, 4), (4, 8), (8, 3), (8, 16))


def grade(solution):
    for p, m in SIZES:
        grade_lists(call(solution, solution.one_f_one_b, p, m), p, m)


def grade_lists(lists, p, m):
    """Raise a Hint unless these lists are 1F1B."""
    timeline = timeline_of(lists, p, m, "FB")
    for rank, alive in enumerate(timeline.peak_activations):
        most = min(m, p - rank)
        extra = {most + 1: "; the warm-up of rank r has p - r - 1 forwards, before the first pair"}.get(alive, "")
        if alive == m > most + 1:
            extra = "; these are all microbatches, as in GPipe: begin backward as soon as one has arrived"
        require(
            alive <= most, f"p = {p}, m = {m}: {alive} microbatches are alive on rank {rank}, at most {most}{extra}"
        )
    shortest = 3 * (m + p - 1)
    require(
        timeline.makespan == shortest,
        f"p = {p}, m = {m}: it takes {timeline.makespan} (T_F = 1, T_B = 2), 1F1B takes {shortest}; the warm-up "
        "differs from rank to rank, p - r - 1 forwards on rank r: with fewer, the last rank waits for work",
    )
