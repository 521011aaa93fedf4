"""Grader of exercise 18, gradients and their norm with expert parallelism."""

import numpy as np

from chapters.exercises.grading import expect, on_ranks, random, require
from minipar.comm import DeviceMesh

SHARED, EXPERTS = 6, 4  # elements of the shared parameters, and of a rank's experts
TOKENS = np.array([3, 8, 0, 5, 2, 9])
SOLVED = "Experts are divided once, by the tokens of all ranks, and the norm is that of one device (section 12.6)."


def norm(*arrays):
    return float(np.sqrt(sum((array**2).sum() for array in arrays)))


def grade(solution):
    for ranks, P in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3)):
        tokens = TOKENS[:ranks]
        shared = random(ranks).normal(size=(ranks, SHARED)) * tokens[:, None]
        # of[r, j]: the part of rank r's tokens in the gradient of the experts of place j
        of = random(ranks, P).normal(size=(ranks, P, EXPERTS)) * tokens[:, None, None]
        groups = of.reshape(ranks // P, P, P, EXPERTS).sum(axis=1)  # (d/P, place, m): summed over the tokens of ep

        def program(comm, P=P, shared=shared, groups=groups, tokens=tokens):
            r, mesh = comm.rank, DeviceMesh(comm, dp=comm.size, ep=P)
            own = groups[r // P, r % P].copy()
            return solution.mean_gradients(mesh, shared[r].copy(), own, int(tokens[r]))

        count, every = tokens.sum(), groups.sum(axis=0)  # (place, m)
        right = shared.sum(0) / count
        whole = norm(right, every / count)
        for rank, result in enumerate(on_ranks(solution, ranks, program)):
            where = f"rank {rank} of {ranks}, P = {P}"
            shape = "return the gradient of shared, that of experts, and the norm"
            require(isinstance(result, tuple) and len(result) == 3, f"{where}: {shape}")
            expect(
                result[0],
                right,
                f"{where}, shared",
                {
                    "sum it over all ranks of dp": (shared[rank] / count, shared[rank] / max(tokens[rank], 1)),
                    "this is the sum: divide by the tokens of all ranks": shared.sum(0),
                    "divide by the tokens of all ranks, not by this rank's": shared.sum(0) / max(tokens[rank], 1),
                    "divided by the ranks once more: the tokens of all ranks are counted already": right / ranks,
                    "divided by the tokens twice": right / count,
                }
                if ranks > 1
                else {"divided by the tokens twice": right / count},
            )
            place = rank % P
            own, mine = every[place] / count, groups[rank // P, place]
            in_ep = tokens[rank - place : rank - place + P].sum()
            mistakes = {
                f"P = {P} times too large: it covers the tokens of the P ranks already; divide by those of all": own
                * P,
                f"P = {P} times too small: divide by the tokens of all ranks, and by nothing else": own / P
                if P > 1
                else (),
                "divided by the ranks once more: the tokens of all ranks are counted already": own / ranks,
                "divided by the tokens twice": own / count,
                "other ranks hold the same experts: sum over mesh.edp": (mine / count, mine / max(in_ep, 1)),
                "experts that are not the same are added up: sum over mesh.edp, not over dp or ep": (
                    groups.sum((0, 1)) / count,
                    groups[rank // P].sum(0) / count,
                ),
                "divide by the tokens of all ranks, as every gradient": (every[place] / max(in_ep, 1), every[place]),
            }
            if ranks == 1:
                mistakes = {"divided by the tokens twice": own / count}
            expect(result[1], own, f"{where}, experts", mistakes)
            alone = norm(right, own)
            copies = ranks // P
            squares = float((right**2).sum())
            experts = float((every**2).sum()) / count**2
            mistakes = {
                "the experts of the other ranks are missing: sum their squares over mesh.ep": alone,
                "the experts are missing": norm(right),
                "each expert counts d/P times: sum the squares over mesh.ep, not over dp": np.sqrt(
                    squares + copies * experts
                ),
                "shared parameters count more than once: every rank has their whole gradient": (
                    np.sqrt(P * squares + experts),
                    np.sqrt(ranks * squares + experts),
                    np.sqrt(ranks * squares + copies * experts),
                ),
                "this is the square of the norm": whole**2,
            }
            missing = {"the experts are missing": norm(right)}
            expect(result[2], whole, f"{where}, norm", mistakes if ranks > 1 else missing)
