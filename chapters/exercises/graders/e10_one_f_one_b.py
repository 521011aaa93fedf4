"""Grader of exercise 10, 1F1B as lists."""

from chapters.exercises.grading import Hint, call, require
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Schedule, parse_action
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.lower import lower
from minipar.parallel.pipeline.simulate import Durations, simulate

SIZES = ((1, 1), (1, 4), (2, 1), (2, 5), (3, 7), (4, 2), (4, 4), (4, 8), (8, 3), (8, 16))
DURATIONS = Durations(forward=1, backward_input=1, backward_weight=1)  # B takes 2


def timeline_of(lists, p, m, kinds):
    """Return the timeline of a reader's lists with one stage for each rank. Hint if they are no schedule."""
    require(isinstance(lists, list) and len(lists) == p, f"p = {p}, m = {m}: expected a list of {p} lists")
    wanted = {f"{kind}{i}" for kind in kinds for i in range(m)}
    for rank, actions in enumerate(lists):
        where = f"p = {p}, m = {m}, rank {rank}"
        require(isinstance(actions, list), f'{where}: expected a list of actions like "F0", not {actions!r}')
        unknown = [action for action in actions if action not in wanted]
        require(not unknown, f"{where}: {unknown[:1]} is no action; with m = {m} they are {sorted(wanted)}")
        missing, twice = wanted - set(actions), [action for action in actions if actions.count(action) > 1]
        require(not missing, f"{where}: it never runs {', '.join(sorted(missing))}")
        require(not twice, f"{where}: it runs {twice[:1]} more than once")
    try:
        schedule = Schedule.of(
            "yours", [[parse_action(f"{rank}{action}") for action in actions] for rank, actions in enumerate(lists)]
        )
        timeline = simulate(schedule, DURATIONS)
        check(lower(schedule))
    except UsageError as error:
        raise Hint(f"p = {p}, m = {m}: {error}") from None
    return timeline


def grade(solution):
    for p, m in SIZES:
        lists = call(solution, solution.one_f_one_b, p, m)
        timeline = timeline_of(lists, p, m, "FB")
        for rank, alive in enumerate(timeline.peak_activations):
            most = min(m, p - rank)
            extra = {most + 1: "; the warm-up of rank r has p - r - 1 forwards, before the first pair"}.get(alive, "")
            if alive == m > most + 1:
                extra = "; these are all microbatches, as in GPipe: begin backward as soon as one has arrived"
            require(
                alive <= most,
                f"p = {p}, m = {m}: {alive} microbatches are alive on rank {rank}, at most {most}{extra}",
            )
        shortest = 3 * (m + p - 1)
        require(
            timeline.makespan == shortest,
            f"p = {p}, m = {m}: it takes {timeline.makespan} (T_F = 1, T_B = 2), 1F1B takes {shortest}; the warm-up "
            "differs from rank to rank, p - r - 1 forwards on rank r: with fewer, the last rank waits for work",
        )
