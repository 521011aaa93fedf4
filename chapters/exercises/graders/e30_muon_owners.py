"""Grader of exercise 30, Muon whose matrices have owners."""

import numpy as np

from chapters.exercises.e30_muon_owners import muon_step
from chapters.exercises.grading import counted, expect, on_ranks, random, require, same

STEPS = 3
SHAPES = ((4, 6), (6, 4), (3, 5), (5, 5), (2, 7))
OWNERS = ((0, 0, 0, 0, 0), (1, 0, 1, 0, 1), (2, 0, 2, 1, 0), (3, 1, 0, 3, 1), (4, 2, 0, 1, 2))  # for 1 to 5 ranks
SOLVED = "One rank updates each matrix, and the bytes are those of one all-reduce (chapters/more/muon)."


def initial():
    return [random(30, i).normal(size=shape) for i, shape in enumerate(SHAPES)]


def gradients_of(step, rank):
    return [random(30, step, rank, i).normal(size=shape) for i, shape in enumerate(SHAPES)]


def by_parts(matrix, gradient, mean, ranks):
    """Update blocks of rows, one of each rank, as if each were a matrix."""
    for rows in np.array_split(np.arange(len(matrix)), ranks):
        if len(rows):
            block, kept = matrix[rows], mean[rows]
            muon_step(block, gradient[rows], kept)
            matrix[rows], mean[rows] = block, kept


def of_each(matrix, gradients, means):
    """Update with the mean of the ranks' own updates: each has a running mean of its own gradients."""
    updated = [matrix.copy() for _ in gradients]
    for own, gradient, mean in zip(updated, gradients, means, strict=True):
        muon_step(own, gradient, mean)
    matrix[...] = sum(updated) / len(updated)


def one_device(ranks, how=""):
    """Return the matrices after each step of one device with all samples, and the running means after the last.

    `how` names a mistake.
    """
    matrices, history = initial(), []
    means = [np.zeros(shape) for shape in SHAPES]
    own_means = [[np.zeros(shape) for _ in range(ranks)] for shape in SHAPES]
    for step in range(STEPS):
        each = [gradients_of(step, rank) for rank in range(ranks)]
        for i, matrix in enumerate(matrices):
            gradients = [own[i] for own in each]
            if how == "fresh":
                means[i][...] = 0
            if how == "parts":
                by_parts(matrix, sum(gradients) / ranks, means[i], ranks)
            elif how == "each":
                of_each(matrix, gradients, own_means[i])
            else:
                muon_step(matrix, sum(gradients) / ranks, means[i])
        history.append([matrix.copy() for matrix in matrices])
    return history, means


HINTS = {
    "each": "sum the gradients first, then let the owner orthogonalize: U V^T of a sum is not the sum of U V^T",
    "parts": "a part of the matrix was orthogonalized: its owner needs all of its rows",
    "fresh": "the running mean is new in every step: keep it",
}


def grade(solution):
    for ranks, owner in enumerate(OWNERS, start=1):

        def program(comm, owner=owner):
            matrices = initial()
            optimizer = solution.MuonOwners(comm, matrices, owner)
            history, sent = [], []
            for step in range(STEPS):
                comm.traffic.reset()
                optimizer.step(gradients_of(step, comm.rank))
                history.append([matrix.copy() for matrix in matrices])
                sent.append(comm.traffic.bytes() // 8)
            means = getattr(optimizer, "means", None)
            return history, sent, means if isinstance(means, dict) else None

        results = on_ranks(solution, ranks, program)
        right, right_means = one_device(ranks)
        wrong = {hint: one_device(ranks, how)[0] for how, hint in HINTS.items()}
        for rank, (history, _, means) in enumerate(results):
            check_values(ranks, rank, owner, history, right, wrong)
            own = [i for i, who in enumerate(owner) if who == rank]
            found = None if means is None else sorted(means)
            require(
                found == own,
                f"rank {rank} of {ranks}: self.means has {found}, expected {own}: keep the means of your own matrices",
            )
            # One rank has no mean over ranks. With more, a sum shows here alone: orthogonalizing hides the factor.
            for i in own if ranks > 1 else []:
                of_sums = {"this is of the sum over the ranks, the mean is asked for": ranks * right_means[i]}
                where = f"rank {rank} of {ranks}, self.means[{i}] after {STEPS} steps"
                expect(means[i], right_means[i], where, of_sums)
        for step in range(STEPS):
            check_bytes(ranks, sum(sent[step] for _, sent, _ in results))


def check_values(ranks, rank, owner, history, right, wrong):
    """Compare a rank's matrices after each step with one device."""
    for step, matrices in enumerate(history):
        for i, value in enumerate(matrices):
            before = initial()[i] if step == 0 else history[step - 1][i]
            own = before.copy()
            if step == 0:
                muon_step(own, gradients_of(0, owner[i])[i], np.zeros(own.shape))
            mistakes = {
                "as before: the owner updates in place the array that was given, and then sends it to all": before,
                "the gradient of the owner's own samples: it needs the mean over all ranks": own,
            }
            mistakes |= {hint: found[step][i] for hint, found in wrong.items()}
            expected = right[step][i]
            mistakes = {hint: found for hint, found in mistakes.items() if not same(found, expected)}
            where = f"rank {rank} of {ranks}, step {step}, matrix {i} of rank {owner[i]}"
            expect(value, expected, where, mistakes)


def check_bytes(ranks, sent):
    """Compare the elements that all ranks send in a step with the formula."""
    fewest = 2 * (ranks - 1) * sum(rows * columns for rows, columns in SHAPES)
    advice = "send each gradient to its owner alone, and each new matrix once to every other rank"
    where = f"with {counted(ranks, 'rank')}, a step sends {sent} elements in all"
    require(sent == fewest, f"{where}, expected {fewest}: {advice}")
