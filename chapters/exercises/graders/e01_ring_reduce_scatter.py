"""Grader of exercise 1, a ring reduce-scatter."""

from chapters.exercises.grading import Hint, expect, on_ranks, random, require
from minipar.comm import chunk_bounds


def grade(solution):
    for ranks, size in ((1, 5), (2, 8), (2, 7), (3, 10), (4, 16), (5, 13), (7, 30), (8, 3)):
        bounds = chunk_bounds(size, ranks)
        arrays = [random(ranks, rank).normal(size=size) for rank in range(ranks)]
        total = sum(arrays)

        def program(comm, arrays=arrays):
            x = arrays[comm.rank].copy()
            chunk = solution.reduce_scatter(comm, x)
            return chunk, (x == arrays[comm.rank]).all(), comm.traffic.messages(), comm.traffic.bytes() // 8

        for rank, (chunk, unchanged, messages, sent) in enumerate(on_ranks(solution, ranks, program)):
            where = f"rank {rank} of {ranks}, {size} elements"
            start, stop = bounds[rank]
            right, left = bounds[(rank + 1) % ranks], bounds[rank - 1]
            require(unchanged, f"{where}: x has changed; add into an array of your own")
            expect(
                chunk,
                total[start:stop],
                where,
                {
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
