"""Schedules written as text, and random ones, for the tests of the checker and of the simulators."""

from minipar.parallel.pipeline.actions import Action, Schedule, parse_action
from minipar.parallel.pipeline.check import lower


def schedule(*rows, name="mine"):
    """From one string of actions for each rank."""
    return Schedule.of(name, [[parse_action(cell) for cell in row.split()] for row in rows])


def shuffled(rng, row, after):
    """A random order of one rank's actions in which each comes after those of `after[action]` that are its own."""
    left, result = sorted(row), []
    while left:
        free = [action for action in left if not any(need in left for need in after[action])]
        result.append(rng.choice(free))
        left.remove(result[-1])
    return result


def random_schedule(rng, consistent):
    """Stages on ranks at random, whole and halved backwards, any order that each rank alone can do; `consistent`: that
    all ranks can do together.
    """
    stages, m = rng.randint(1, 5), rng.randint(1, 3)
    homes = [rng.randrange(3) for _ in range(stages)]
    homes = [sorted(set(homes)).index(home) for home in homes]
    actions = []
    for s in range(stages):
        for k in range(m):
            kinds = ("F", "B") if rng.random() < 0.5 else ("F", "I", "W")
            actions += [Action(s, kind, k) for kind in kinds]
    rows = [[a for a in actions if homes[a.stage] == rank] for rank in range(max(homes) + 1)]
    after = {a: Schedule.of("random", rows).needs(a) for a in actions}
    if consistent:
        order = shuffled(rng, actions, after)
        rows = [[a for a in order if homes[a.stage] == rank] for rank in range(len(rows))]
    else:
        rows = [shuffled(rng, row, after) for row in rows]
    return Schedule.of("random", rows)


def shuffle_messages(rng, mine):
    """The same computations in the same order; each send anywhere after its result, each receive before its use."""
    whole = lower(mine)
    rows = []
    for row in whole.ranks:
        compute = [a for a in row if a.computes]
        after = {a: set(compute[:i]) for i, a in enumerate(compute)}
        for a in row:
            kinds = ("F",) if a.kind[-1] == "F" else ("B", "I")
            own = [Action(a.stage, kind, a.microbatch) for kind in kinds]
            if a.kind.startswith("SEND"):
                after[a] = set(own)
            elif a.kind.startswith("RECV"):
                after.setdefault(a, set())
                for user in own:
                    if user in after:
                        after[user].add(a)
        rows.append(shuffled(rng, row, after))
    return Schedule.of("random", rows)
