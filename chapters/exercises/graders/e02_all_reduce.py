"""Grader of exercise 2, all-reduce = reduce-scatter + all-gather."""

import numpy as np

from chapters.exercises.grading import Hint, expect, on_ranks, random, require, same
from minipar.comm import chunk_bounds

SOLVED = "You sent 2n(p-1)/p elements, the least possible for an all-reduce; section 3.3 proves it."


def grade(solution):
    for ranks, size in ((1, 4), (2, 6), (3, 11), (4, 16), (5, 15), (8, 40), (8, 5)):
        grade_gather(solution, ranks, size)
        grade_reduce(solution, ranks, size)


def grade_gather(solution, ranks, size):
    bounds, whole = chunk_bounds(size, ranks), np.arange(float(size))

    def program(comm):
        result = solution.all_gather(comm, whole[slice(*bounds[comm.rank])].copy(), size)
        return result, comm.traffic.bytes() // 8

    for rank, (result, sent) in enumerate(on_ranks(solution, ranks, program)):
        where = f"all_gather, rank {rank} of {ranks}, {size} elements"
        arrival = np.concatenate([whole[slice(*bounds[(rank - k) % ranks])] for k in range(ranks)])
        own_first = np.concatenate([whole[slice(*bounds[(rank + k) % ranks])] for k in range(ranks)])
        if same(result[slice(*bounds[rank])], whole[slice(*bounds[rank])]):
            ahead = slice(*bounds[rank - 1])
            is_first_round = ranks > 2 and same(result[ahead], whole[ahead]) and not same(result, whole)
            hint = (
                "only your left neighbour's chunk is right: from the second round on send what arrived in the last one"
            )
            require(not is_first_round or same(np.sort(result), whole), f"{where}: {hint}")
        else:
            kept = np.delete(np.arange(size), np.arange(*bounds[rank]))
            is_missing = np.shape(result) == (size,) and same(result[kept], whole[kept])
            require(not is_missing, f"{where}: your own chunk is missing: copy it to its place")
        hint = "the chunks stand in the order of their arrival: chunk r belongs at chunk_bounds(n, p)[r]"
        expect(result, whole, where, {hint: (arrival, own_first)})
        if size % ranks == 0:
            check_sent(where, sent, size * (ranks - 1) // ranks)


def grade_reduce(solution, ranks, size):
    arrays = [random(ranks, rank).normal(size=(1, size)) for rank in range(ranks)]
    results = on_ranks(
        solution, ranks, lambda comm: (solution.all_reduce(comm, arrays[comm.rank].copy()), comm.traffic.bytes() // 8)
    )
    total = sum(arrays)
    for rank, (result, _) in enumerate(results):
        where = f"all_reduce, rank {rank} of {ranks}, {size} elements"
        mistakes = {
            "the values are right, but the shape of x is lost": total[0],
            "this is your own x: nothing was added": arrays[rank],
            "these are the ranks' own chunks: reduce-scatter x before you gather": np.concatenate(
                [arrays[r][:, slice(*chunk_bounds(size, ranks)[r])] for r in range(ranks)], axis=1
            ),
        }
        expect(result, total, where, mistakes)
    if any(result.tobytes() != results[0][0].tobytes() for result, _ in results):
        rotated = [sum(arrays[(rank + k) % ranks] for k in range(ranks)) for rank in range(ranks)]
        own_first = all(result.tobytes() == rotated[rank].tobytes() for rank, (result, _) in enumerate(results))
        cause = "your sum starts at your own rank, so the bits depend on the rank" if own_first else "the bits differ"
        raise Hint(f"all_reduce on {ranks} ranks: {cause}: add every element once, in one order, then copy the sum")
    if size % ranks == 0:
        for rank, (_, sent) in enumerate(results):
            check_sent(f"all_reduce, rank {rank} of {ranks}, {size} elements", sent, 2 * size * (ranks - 1) // ranks)


def check_sent(where, sent, fewest):
    if sent > fewest:
        raise Hint(
            f"{where}: it sends {sent} elements, {fewest} are enough: "
            "send each rank's chunk only, never an array that still has to be added up"
        )
    require(sent == fewest, f"{where}: it sends {sent} elements with isend, expected {fewest}")
