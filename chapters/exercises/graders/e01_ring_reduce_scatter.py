"""Grader of exercise 1, a ring reduce-scatter."""

from chapters.exercises.grading import Hint, expect, on_ranks, random, require
from minipar.comm import chunk_bounds

SOLVED = "Rank r sent all elements but those of its own chunk, once: half of the all-reduce's bytes (section 3.3)."


def grade(solution):
    for ranks, size in ((1, 5), (2, 8), (2, 7), (3, 10), (4, 16), (5, 13), (7, 30), (8, 3)):
        bounds = chunk_bounds(size, ranks)
        arrays = [random(ranks, rank).normal(size=size) for rank in range(ranks)]
        total = sum(arrays)

        def program(comm, arrays=arrays):
            x = arrays[comm.rank].copy()
            chunk = solution.reduce_scatter(comm, x)
            return chunk, (x == arrays[comm.rank]).all(), comm.traffic.messages(), comm.traffic.bytes() // 8

        try:
            results = on_ranks(solution, ranks, program)
        except Hint as hint:
            if "no partner" not in str(hint):
                raise
            ring = "rank r sends to r + 1, receives from r - 1, and begins with chunk r - 1"
            raise Hint(f"{hint}\nIs it the ring of the task? In it {ring}.") from None
        for rank, (chunk, unchanged, messages, sent) in enumerate(results):
            where = f"rank {rank} of {ranks}, {size} elements"
            start, stop = bounds[rank]
            right, left = bounds[(rank + 1) % ranks], bounds[rank - 1]
            require(unchanged, f"{where}: x has changed; add into an array of your own")
            neighbours = arrays[rank - 1] + arrays[rank]
            without_right = total - arrays[(rank + 1) % ranks]
            mistakes = {}
            if ranks == 1:
                mistakes["there is a round too many: p ranks need p - 1"] = 2 * total
            if ranks == 2:
                moved = arrays[1 - rank][start:stop] + arrays[rank][slice(*left)] if size % 2 == 0 else ()
                mistakes["you add another chunk than the one that arrives: in round s it is chunk rank - 1 - s"] = moved
            if ranks > 2:
                mistakes["these are two ranks' parts: pass on the sum that you have, not your own part"] = neighbours[
                    start:stop
                ]
            expect(
                chunk,
                total[start:stop],
                where,
                mistakes
                | {
                    "a round is missing: there are p - 1": without_right[slice(*right)] if ranks > 1 else (),
                    "this is chunk rank + 1: start with the chunk of your left neighbour": total[slice(*right)],
                    "this is chunk rank - 1: your first chunk is one place too far": total[slice(*left)],
                    "this is one rank's part alone: add your own elements to what arrives": arrays[(rank + 1) % ranks][
                        start:stop
                    ],
                    "this is your own part alone: the sum that arrives for this chunk is not in it": arrays[rank][
                        start:stop
                    ],
                    "this is the whole sum: return your chunk only": total,
                },
            )
            if sent != size - (stop - start):
                raise Hint(
                    f"{where}: it sends {sent} elements, expected {size - (stop - start)}: "
                    "send one chunk in each round, not the whole array"
                )
            require(messages == ranks - 1, f"{where}: it sends {messages} messages, expected {ranks - 1}")
