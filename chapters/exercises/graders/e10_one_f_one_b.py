"""Grader of exercise 10, 1F1B as lists."""

from itertools import takewhile

from chapters.exercises.graders.schedules import check_actions, timeline_of
from chapters.exercises.grading import call, require

SIZES = ((1, 1), (1, 4), (2, 1), (2, 5), (3, 7), (4, 2), (4, 4), (4, 8), (8, 3), (8, 16))
SOLVED = "Your lists take GPipe's time, (m + p - 1)(T_F + T_B), with min(m, p - r) alive in place of m (section 7.3)."


def grade(solution):
    for p, m in SIZES:
        grade_lists(call(solution, solution.one_f_one_b, p, m), p, m)


def grade_lists(lists, p, m):
    """Raise a Hint unless these lists are 1F1B."""
    check_actions(lists, p, m, "FB")
    begun = [len(list(takewhile(lambda action: action[0] == "F", actions))) for actions in lists]
    right = [min(m, p - rank) for rank in range(p)]
    require(
        begun == right or begun != right[::-1],
        f"p = {p}, m = {m}: the warm-up is mirrored: it has r forwards on rank r, and p - r - 1 are right; "
        "rank 0 waits longest for its first backward",
    )
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
    orders = [[action for action in actions if action[0] == "B"] for actions in lists]
    in_order = all(order == [f"B{i}" for i in range(m)] for order in orders)
    reason = "the backwards of a rank run in the order of the microbatches, B0, B1, B2, ..."
    if in_order:
        reason = "the warm-up differs from rank to rank, p - r - 1 forwards on rank r: "
        reason += "with fewer, the last rank waits for work"
    require(
        timeline.makespan == shortest,
        f"p = {p}, m = {m}: it takes {timeline.makespan} (T_F = 1, T_B = 2), 1F1B takes {shortest}; {reason}",
    )
