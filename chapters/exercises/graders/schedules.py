"""A reader's lists of actions as a checked schedule, for exercises 10 and 11."""

from itertools import pairwise

from chapters.exercises.grading import Hint, require
from minipar.errors import UsageError
from minipar.parallel.pipeline.actions import Durations, Schedule, parse_action, simulate
from minipar.parallel.pipeline.check import check, lower

DURATIONS = Durations(forward=1, backward_input=1, backward_weight=1)  # B takes 2


def check_actions(lists, p, m, kinds):
    """Raise a Hint unless each list has every action once, those of a microbatch in the order of `kinds`."""
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
        for i in range(m):
            for first, second in pairwise(f"{kind}{i}" for kind in kinds):
                is_right = actions.index(first) < actions.index(second)
                require(is_right, f"{where}: it runs {second} before {first}, which makes what {second} needs")


def timeline_of(lists, p, m, kinds):
    """Return the timeline of a reader's lists with one stage for each rank. Hint if they are no schedule."""
    check_actions(lists, p, m, kinds)
    try:
        schedule = Schedule.of(
            "yours", [[parse_action(f"{rank}{action}") for action in actions] for rank, actions in enumerate(lists)]
        )
        timeline = simulate(schedule, DURATIONS)
        check(lower(schedule))
    except UsageError as error:
        raise Hint(f"p = {p}, m = {m}: {error}") from None
    return timeline
