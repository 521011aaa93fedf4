"""Grader of exercise 15, the backward pass of ring attention."""

import numpy as np

from chapters.exercises.grading import Hint, expect, on_ranks, random, require

TOKENS, WIDTH = 3, 2
SOLVED = "All gradients are with their owners: kv made c - 1 hops, and its gradient c (chapter 11)."


def term(rank, owner, q, kv):
    """Return the terms of rank's queries with owner's keys: linear in both, with coefficients of their own."""
    mix = random(rank, owner).normal(size=(TOKENS, TOKENS))
    return mix @ kv[0] + kv[1], np.stack([mix.T @ q, q])


def grade(solution):
    for ranks in (1, 2, 3, 5):
        q = random(ranks, 0).normal(size=(ranks, TOKENS, WIDTH))
        kv = random(ranks, 1).normal(size=(ranks, 2, TOKENS, WIDTH))

        def program(comm, ranks=ranks, q=q, kv=kv):
            calls = []

            def terms(queries, keys, source):
                where = f"rank {comm.rank} of {ranks}, call {len(calls) + 1} of terms"
                require(0 <= source < ranks, f"{where}: there is no rank {source}; count modulo {ranks}")
                require(np.array_equal(queries, q[comm.rank]), f"{where}: pass this rank's own queries")
                whose = [r for r in range(ranks) if np.array_equal(keys, kv[r])]
                if whose != [source]:
                    held = f"those of rank {whose[0]}" if whose else "no rank's, they have changed"
                    raise Hint(
                        f"{where}: these should be the keys and values of rank {source}, but are {held}: in step s "
                        "rank r has what began on rank r - s: pass them on between two steps, and begin with your own"
                    )
                calls.append(source)
                return term(comm.rank, source, queries, keys)

            own = kv[comm.rank].copy()
            result = solution.ring_backward(comm, q[comm.rank].copy(), own, terms)
            require(isinstance(result, tuple) and len(result) == 2, "return the gradients of q and of kv")
            require(np.array_equal(own, kv[comm.rank]), f"rank {comm.rank} of {ranks}: kv has changed")
            return result, calls, comm.traffic.bytes() // 8

        table = [[term(r, owner, q[r], kv[owner]) for owner in range(ranks)] for r in range(ranks)]
        gradients = [sum(table[r][owner][1] for r in range(ranks)) for owner in range(ranks)]
        for rank, ((dq, dkv), calls, sent) in enumerate(on_ranks(solution, ranks, program)):
            where = f"rank {rank} of {ranks}"
            require(
                sorted(calls) == list(range(ranks)),
                f"{where}: terms was called for the owners {calls}, not for each once",
            )
            own = {"these are your own tokens' terms only: add those with every owner's keys": table[rank][rank][0]}
            own["these are the last step's terms only: add those of all steps"] = table[rank][(rank + 1) % ranks][0]
            expect(dq, sum(table[rank][owner][0] for owner in range(ranks)), f"{where}, gradient of q", own)
            last = table[rank - 1][rank][1]
            mistakes = {
                "this is the gradient of the right neighbour's: it is complete, and must make one hop more, home": (
                    gradients[(rank + 1) % ranks]
                ),
                "these are your own queries' terms only: the gradient must travel with its keys": table[rank][rank][1],
                "these are terms of your own queries for all keys: they belong to the owners of the keys": sum(
                    table[rank][owner][1] for owner in range(ranks)
                ),
                "these are the last step's terms only: add to what arrives": last,
            }
            expect(dkv, gradients[rank], f"{where}, gradient of kv", mistakes if ranks > 1 else {})
            expected = (2 * ranks - 1) * kv[0].size if ranks > 1 else 0
            if sent != expected:
                raise Hint(
                    f"{where}: {sent} elements were sent, expected {expected}: kv makes c - 1 hops and its gradient c; "
                    "one rank sends nothing"
                )
