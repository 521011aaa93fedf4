"""Grader of exercise 31, a round of DiLoCo."""

import numpy as np

from chapters.exercises.grading import counted, expect, on_ranks, random, require, same

ROUNDS = 3
ONE_ARRAY = "the local steps have changed the parameters themselves, so nothing seems to have moved: take a copy first"
UNCHANGED = "nothing has changed: change the arrays that were given, in place; local_step changes its own in place"
SOLVED = "The ranks sent one all-reduce in H steps, where data parallelism sends H (chapters/more/diloco)."


class Momentum:
    """A rank's optimizer: SGD with momentum, for the squares of a distance that every step measures anew."""

    def __init__(self, rank, n):
        self.rank, self.velocity, self.steps = rank, np.zeros(n), 0

    def __call__(self, values):
        scale, target = random(31, self.rank, self.steps).normal(size=(2, values.size))
        self.velocity = 0.5 * self.velocity + scale * scale * (values - target)
        values -= 0.1 * self.velocity
        self.steps += 1


def outer(values, velocity, moved, *, nesterov=True, rate=0.7, momentum=0.9, sign=1):
    """Return the next parameters and velocity. The keywords are mistakes."""
    velocity = momentum * velocity + sign * moved
    return values + rate * (sign * moved + 0.9 * velocity if nesterov else velocity), velocity


def one_device(n, ranks, H, *, share=None, only=None, **how):
    """Return (parameters, velocity) after each round. The keywords are mistakes.

    share: divide by it; only: this rank moves alone; the others are `outer`'s.
    """
    values, velocity, history = np.arange(n) / n, np.zeros(n), []
    optimizers = [Momentum(rank, n) for rank in range(ranks)]
    for _ in range(ROUNDS):
        ends = [values.copy() for _ in optimizers]
        for end, optimizer in zip(ends, optimizers, strict=True):
            for _ in range(H):
                optimizer(end)
        movements = [end - values for end in ends]
        moved = movements[only] if only is not None else sum(movements) / (share or ranks)
        values, velocity = outer(values, velocity, moved, **how)
        history.append((values, velocity))
    return history


def not_copied(n, rank, H):
    """Return (parameters, velocity) after each round of a rank whose local steps change the parameters themselves."""
    values, optimizer, history = np.arange(n) / n, Momentum(rank, n), []
    for _ in range(ROUNDS):
        for _ in range(H):
            optimizer(values)
        history.append((values.copy(), np.zeros(n)))
    return history


def mistakes_of(n, ranks, H, rank):
    """Return by its hint the history of each mistake."""
    return {
        "this is the sum of the ranks' movements, their mean is asked for": one_device(n, ranks, H, share=1),
        "these are your own steps: all-reduce the movement": one_device(n, ranks, H, only=rank),
        "0.9 velocity comes on top of the movement (Nesterov): 0.7 (D + 0.9 velocity)": one_device(
            n, ranks, H, nesterov=False
        ),
        "the sign: the movement is a step already, so it is added": one_device(n, ranks, H, sign=-1),
        "there is no outer rate of 0.7": one_device(n, ranks, H, rate=1.0),
        "the parameters before the local steps are lost: take the steps with a copy": not_copied(n, rank, H),
        "the velocity is new in every round: it keeps 0.9 of the last one": one_device(n, ranks, H, momentum=0.0),
    }


def grade(solution):
    for ranks, n, H in ((1, 5, 1), (2, 6, 4), (3, 9, 1), (4, 10, 4)):

        def program(comm, n=n, H=H):
            parameters, velocity, optimizer = np.arange(n) / n, np.zeros(n), Momentum(comm.rank, n)
            history = []
            for number in range(ROUNDS):
                ends = []

                def local_step(values, ends=ends):
                    require(np.shape(values) == (n,), f"local_step was given {np.shape(values)}, expected ({n},)")
                    begin = np.array(values)
                    optimizer(values)
                    ends.append((begin, np.array(values)))

                before = parameters.copy()
                comm.traffic.reset()
                solution.outer_round(comm, parameters, velocity, H, local_step)
                check_steps(f"rank {comm.rank} of {comm.size}, round {number}", H, before, ends)
                history.append((parameters.copy(), velocity.copy(), comm.traffic.bytes() // 8))
            return history

        results = on_ranks(solution, ranks, program)
        for number in range(ROUNDS):
            sent, fewest = sum(history[number][2] for history in results), 2 * n * (ranks - 1)
            require(
                sent == fewest,
                f"with {counted(ranks, 'rank')} and H = {H}, a round sends {sent} elements in all, expected {fewest}: "
                "one all-reduce of the movement after the last local step, and nothing else",
            )
        right = one_device(n, ranks, H)
        for rank, history in enumerate(results):
            mistakes = mistakes_of(n, ranks, H, rank)
            for number, found in enumerate(history):
                where = f"rank {rank} of {ranks}, H = {H}, round {number}"
                for kind, what in enumerate(("parameters", "velocity")):
                    expected = right[number][kind]
                    known = {hint: wrong[number][kind] for hint, wrong in mistakes.items()}
                    known[UNCHANGED] = (np.arange(n) / n, np.zeros(n))[kind]
                    known[ONE_ARRAY] = np.zeros(n)
                    known = {hint: wrong for hint, wrong in known.items() if not same(wrong, expected)}
                    expect(found[kind], expected, f"{where}, {what}", known)


def check_steps(where, H, before, ends):
    """Compare what the local steps were given with what they should have been given."""
    require(len(ends) == H, f"{where}: local_step was called {len(ends)} times, expected {H}")
    begin = before
    for step, (given, end) in enumerate(ends):
        hint = "begin at the common parameters" if step == 0 else "go on from where the step before has ended"
        require(same(given, begin), f"{where}, local step {step} was given other parameters: {hint}")
        begin = end
