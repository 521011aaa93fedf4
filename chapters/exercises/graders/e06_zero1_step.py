"""Grader of exercise 6, a step of ZeRO stage 1."""

import numpy as np

from chapters.exercises.e06_zero1_step import AdamState, adam_step
from chapters.exercises.grading import Hint, expect, on_ranks, random, require
from minipar.comm import chunk_bounds

STEPS = 3
SOLVED = "Each rank holds 1/d of the optimizer's state, and the bytes are those of data parallelism (section 5.2)."


def gradient_of(step, rank, size):
    return random(step, rank).normal(size=size)


def one_device(ranks, size, scale=None, forget=False, own=False):
    """Return the parameters after each step of one device with all samples. The last two are mistakes.

    forget: the state is new in each step. own: the gradient of chunk r is that of rank r's samples alone.
    """
    values, state, history = np.arange(float(size)), AdamState(size), []
    for step in range(STEPS):
        gradient = sum(gradient_of(step, rank, size) for rank in range(ranks)) * (scale or 1 / ranks)
        if own:
            chunks = enumerate(chunk_bounds(size, ranks))
            gradient = np.concatenate([gradient_of(step, r, size)[start:stop] for r, (start, stop) in chunks])
        adam_step(values, gradient, AdamState(size) if forget else state)
        history.append(values.copy())
    return history


def grade(solution):
    for ranks, size in ((1, 4), (2, 8), (3, 12), (4, 10), (5, 25)):
        bounds = chunk_bounds(size, ranks)

        def program(comm, size=size):
            parameters = np.arange(float(size))
            optimizer = solution.ZeroOne(comm, parameters)
            history = []
            for step in range(STEPS):
                comm.traffic.reset()
                optimizer.step(gradient_of(step, comm.rank, size))
                history.append((parameters.copy(), comm.traffic.bytes() // 8))
            state = getattr(optimizer, "state", None)
            return history, getattr(getattr(state, "mean", None), "size", None)

        ways = ({}, {"scale": 1.0}, {"forget": True}, {"scale": 1 / ranks**2}, {"own": True})
        right, sums, fresh, twice, alone = (one_device(ranks, size, **how) for how in ways)
        for rank, (history, held) in enumerate(on_ranks(solution, ranks, program)):
            start, stop = bounds[rank]
            for step, (values, sent) in enumerate(history):
                where = f"rank {rank} of {ranks}, step {step}"
                before = np.arange(float(size)) if step == 0 else history[step - 1][0]
                own = before.copy()
                own[start:stop] = right[step][start:stop]
                mistakes = {
                    "only your own chunk is new: after the update, gather into the array that was given": own,
                    "the gradients are summed over the ranks, not averaged": sums[step],
                    "the gradient is divided by the ranks twice": twice[step],
                    "a chunk's gradient is its owner's own: sum it over the ranks": alone[step],
                    "Adam's state is new in every step: make it once": fresh[step],
                    "the parameters are as before: change the array that was given, in place, in every step; a new "
                    "array in its place is not seen": before,
                }
                expect(values, right[step], where, mistakes)
                fewest = 2 * size * (ranks - 1) // ranks
                if size % ranks == 0 and sent != fewest:
                    raise Hint(
                        f"{where}: it sends {sent} elements, expected {fewest}: reduce-scatter the gradient and "
                        "all-gather the parameters; an all-reduce of the gradient is too much"
                    )
            require(
                held == stop - start,
                f"rank {rank} of {ranks}: self.state has {held} elements, expected {stop - start}: "
                "keep the state of your chunk alone",
            )
