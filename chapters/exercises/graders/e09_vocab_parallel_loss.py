"""Grader of exercise 9, cross-entropy over a divided vocabulary."""

import numpy as np

from chapters.exercises.grading import Hint, expect, on_ranks, random, require
from minipar.comm import wire_bytes

TOKENS, VOCABULARY = 8, 8  # the ranks divide the tokens, so that one sum of two values is as long as two sums
TARGETS = np.array([0, 7, 3, 4, 1, 6, 5, 2])
SOLVED = "The exact loss took three values for each token, and no rank has seen all logits (chapter 6)."


def one_device(logits):
    top = logits.max(1, keepdims=True)
    exponentials = np.exp(logits - top)
    total = exponentials.sum(1, keepdims=True)
    rows = np.arange(TOKENS)
    gradient = exponentials / total
    gradient[rows, TARGETS] -= 1
    return (np.log(total) + top)[:, 0] - logits[rows, TARGETS], gradient


def grade(solution):
    for ranks in (1, 2, 4):
        for scale, shift in ((1.0, 0.0), (100.0, 1000.0), (1.0, -1000.0)):
            logits = random(ranks).normal(size=(TOKENS, VOCABULARY)) * scale + shift
            grade_case(solution, ranks, logits, "" if shift == 0 else f", logits around {shift:g}")


def grade_case(solution, ranks, logits, name):
    width = VOCABULARY // ranks

    def program(comm):
        own = logits[:, comm.rank * width : (comm.rank + 1) * width].copy()
        return *solution.cross_entropy(comm, own, TARGETS.copy()), comm.traffic.bytes() // 8

    losses, gradient = one_device(logits)
    with np.errstate(all="ignore"):
        results = on_ranks(solution, ranks, program)
    parts = logits.reshape(TOKENS, ranks, width)
    top = parts.max(2)  # (N, t), each rank's own
    own_sums = np.exp(parts - top[:, :, None]).sum((1, 2))
    rows = np.arange(TOKENS)
    shifted = (TARGETS // width, TARGETS % width)
    for rank, (value, slope, sent) in enumerate(results):
        where, own = f"rank {rank} of {ranks}{name}", slice(rank * width, (rank + 1) * width)
        require(
            bool(np.isfinite(value).all() and np.isfinite(slope).all()),
            f"{where}: overflow or log(0); subtract the largest logit of the token before exp",
        )
        local = np.clip(TARGETS - rank * width, -width, width - 1)
        wrapped = sum(
            np.where(TARGETS < (r + 1) * width, parts[rows, r, np.clip(TARGETS - r * width, -width, width - 1)], 0)
            for r in range(ranks)
        )
        normal = losses + logits[rows, TARGETS]
        maximum = "each rank subtracts its own maximum: sums with different maxima cannot be added"
        mistakes = {
            maximum: (
                np.log(own_sums) + top[:, rank] - logits[rows, TARGETS],
                np.log(own_sums) - (parts[rows, shifted[0], shifted[1]] - top[rows, shifted[0]]),
            ),
            "the target's logit is counted on ranks that do not have it: a negative index counts from the end": normal
            - wrapped,
            "the target's logit comes from your own part only: sum it over the ranks, 0 where it is elsewhere": normal
            - np.where((local == TARGETS - rank * width) & (local >= 0), parts[rows, rank, local], 0),
            "the sum of the exponentials is that of your own part: all-reduce it": np.log(
                np.exp(parts[:, rank] - top.max(1)[:, None]).sum(1)
            )
            + top.max(1)
            - logits[rows, TARGETS],
            "the maximum that you subtract must be added again": losses - top.max(1),
            "the target's logit is counted on every rank, t times": losses - (ranks - 1) * logits[rows, TARGETS],
        }
        expect(value, losses, f"{where}, losses", mistakes)
        softmax = one_device(logits)[1]
        softmax[rows, TARGETS] += 1
        wrong = softmax[:, own].copy()
        wrong[rows, local] -= 1
        hints = {
            "1 is subtracted on ranks that do not have the target": wrong,
            "1 must be subtracted at the target": softmax[:, own],
        }
        expect(slope, gradient[:, own], f"{where}, gradient", hints)
        most = 3 * wire_bytes("all_reduce", "ring", TOKENS, 1, ranks, rank)
        if sent > most:
            raise Hint(
                f"{where}: it sends {sent} elements, at most {most} are needed: for each token a maximum, a sum and "
                "the target's logit"
            )
