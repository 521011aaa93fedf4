"""Grader of exercise 8, an MLP over t ranks."""

import numpy as np

from chapters.exercises.grading import Hint, expect, on_ranks, random, require
from minipar.comm import wire_bytes

TOKENS, HIDDEN = 3, 4
SOLVED = "Two layers over t ranks cost one all-reduce in forward and one in backward (section 6.1)."


def one_device(x, A, b, D, e, dy):
    """Return y and the gradients."""
    inner = x @ A + b
    z = np.maximum(inner, 0)
    dinner = (dy @ D.T) * (inner > 0)
    return z @ D + e, {"x": dinner @ A.T, "A": x.T @ dinner, "b": dinner.sum(0), "D": z.T @ dy, "e": dy.sum(0)}


def grade(solution):
    shapes = ((TOKENS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,), (4 * HIDDEN, HIDDEN), (HIDDEN,), (TOKENS, HIDDEN))
    x, A, b, D, e, dy = (random(key).normal(size=shape) for key, shape in enumerate(shapes))
    y, gradients = one_device(x, A, b, D, e, dy)
    for ranks in (1, 2, 4):
        width = 4 * HIDDEN // ranks
        parts = [slice(rank * width, (rank + 1) * width) for rank in range(ranks)]

        def program(comm, parts=parts):
            own = parts[comm.rank]
            arguments = [array.copy() for array in (x, A[:, own], b[own], D[own], e)]
            output, saved = solution.forward(comm, *arguments)
            output, before = np.array(output), comm.traffic.bytes() // 8
            result = solution.backward(comm, dy.copy(), saved)
            return output, result, before, comm.traffic.bytes() // 8 - before

        for rank, (output, result, sent_forward, sent_backward) in enumerate(on_ranks(solution, ranks, program)):
            where, own = f"rank {rank} of {ranks}", parts[rank]
            alone = one_device(x, A[:, own], b[own], D[own], e, dy)
            expect(
                output,
                y,
                f"{where}, y",
                {
                    "every rank adds the bias e before the sum, so it counts t times: add it after the all-reduce": y
                    + (ranks - 1) * e,
                    "this is your own term of the sum: all-reduce it": alone[0],
                    "the bias e is missing": y - e,
                },
            )
            require(isinstance(result, dict) and set(result) == set(gradients), "backward returns x, A, b, D, e")
            cut = {"x": gradients["x"], "A": gradients["A"][:, own], "b": gradients["b"][own], "D": gradients["D"][own]}
            summed_dy = one_device(x, A[:, own], b[own], D[own], e, ranks * dy)[1]
            own_term = "this is your own term: the gradients of x from all column blocks must be summed"
            no_slope = "the slope of relu is missing: 0 where its input is negative"
            hints = {"x": {own_term: alone[1]["x"]}, "A": {no_slope: x.T @ (dy @ D[own].T)}}
            times = (
                "it counts t times: dy is whole on every rank already, the backward of the all-reduce is the identity"
            )
            for name in ("D", "A", "b", "x", "e"):
                expected = cut.get(name, gradients[name])
                wrong = {times: ranks * expected if name in "xe" else summed_dy[name]} if ranks > 1 else {}
                if name in "AbD" and ranks > 1:
                    axis = 1 if name == "A" else 0
                    wrong[f"the ranks' parts of {name} are added up: each rank keeps its own"] = sum(
                        np.split(gradients[name], ranks, axis)
                    )
                expect(result[name], expected, f"{where}, gradient of {name}", hints.get(name, {}) | wrong)
            once = wire_bytes("all_reduce", "ring", TOKENS * HIDDEN, 1, ranks, rank)
            for what, sent in (("forward", sent_forward), ("backward", sent_backward)):
                if sent != once:
                    raise Hint(
                        f"{where}: {what} sends {sent} elements, one all-reduce of N x h elements sends {once}: "
                        "relu of some columns needs no other columns, so nothing is sent between the two layers"
                    )
