"""Grader of exercise 17, dispatch and combine of rows by all-to-all."""

import numpy as np

from chapters.exercises.grading import Hint, expect, on_ranks, random, require

WIDTH = 3
ROWS = (5, 0, 7, 4)  # of each rank
SOLVED = "Only rows of other ranks' experts travelled, and the results have the bits of one device (section 12.4)."


def case(ranks, each):
    """Return each rank's rows and their experts; the last expert has none if there are several."""
    rows = [random(ranks, rank).normal(size=(ROWS[rank], WIDTH)) for rank in range(ranks)]
    experts = [random(ranks, rank, 1).integers(0, max(ranks * each - 1, 1), ROWS[rank]) for rank in range(ranks)]
    return rows, experts


def grade(solution):
    for ranks, each in ((2, 3), (1, 3), (2, 1), (3, 2), (4, 2)):
        rows, experts = case(ranks, each)
        matrices = random(each, 2).normal(size=(ranks * each, WIDTH, WIDTH))
        everything, of = np.concatenate(rows), np.concatenate(experts)
        expected = [[everything[of == e] for e in range(r * each, (r + 1) * each)] for r in range(ranks)]

        def program(comm, ranks=ranks, each=each, rows=rows, experts=experts, matrices=matrices, expected=expected):
            calls = []
            own = slice(comm.rank * each, (comm.rank + 1) * each)

            def run(arrived, counts):
                calls.append(1)
                check(f"rank {comm.rank} of {ranks}", arrived, counts, expected[comm.rank])
                stretches = np.split(arrived, np.cumsum(counts)[:-1])
                return np.concatenate([x @ matrix for x, matrix in zip(stretches, matrices[own], strict=True)])

            comm.traffic.reset()
            result = solution.run_over_ranks(comm, rows[comm.rank].copy(), experts[comm.rank].copy(), ranks * each, run)
            return result, len(calls), comm.traffic.bytes() // 8

        results = on_ranks(solution, ranks, program)
        rank_of = [each_of // each for each_of in experts]
        for rank, (result, calls, sent) in enumerate(results):
            where = f"rank {rank} of {ranks}, {each} experts each"
            require(calls == 1, f"{where}: run was called {calls} times, not once")
            right = np.array([x @ matrices[e] for x, e in zip(rows[rank], experts[rank], strict=True)])
            right = right.reshape(-1, WIDTH)
            order = np.argsort(experts[rank], kind="stable")
            mistakes = {"these are sorted by expert: put each result back in the place of its row": right[order]}
            hint = "run's results are sorted by expert: put them back in the order of arrival before you send them back"
            mistakes[hint] = unsorted(rank, experts, expected, matrices, order)
            expect(result, right, f"{where}, results", mistakes if len(right) > 1 else {})
            leaving = sum(rank_of[rank] != rank) + sum(
                sum(rank_of[other] == rank) for other in range(ranks) if other != rank
            )
            needed = int(leaving) * WIDTH + each * (ranks - 1)
            require(
                sent == needed,
                f"{where}: {sent} elements were sent, expected {needed}: rows and results travel between their rank "
                "and their expert's, and one integer for each expert of another rank",
            )


def unsorted(rank, experts, expected, matrices, order):
    """Return a rank's results if those of `run` are sent back as they are, sorted by expert."""
    back, each = [], len(expected[0])
    for r, rows in enumerate(expected):
        counts = [int((of // each == r).sum()) for of in experts]  # of each source rank
        outputs = np.concatenate([x @ matrices[r * each + e] for e, x in enumerate(rows)])
        back.append(np.split(outputs, np.cumsum(counts)[:-1])[rank])
    result = np.empty((len(order), WIDTH))
    result[order] = np.concatenate(back)
    return result


def check(where, arrived, counts, expected):
    """Check what an expert-parallel rank gives its experts."""
    counts = np.asarray(counts)
    require(
        counts.shape == (len(expected),),
        f"{where}: counts has shape {counts.shape}, expected ({len(expected)},): one for each of this rank's experts",
    )
    lengths = [len(x) for x in expected]
    require(
        counts.tolist() == lengths,
        f"{where}: the counts are {counts.tolist()}, expected {lengths}: add those of all source ranks",
    )
    together = np.concatenate(expected)
    require(
        np.shape(arrived) == together.shape,
        f"{where}: run was given rows of shape {np.shape(arrived)}, expected {together.shape}",
    )
    if np.array_equal(arrived, together):
        return
    if sorted(map(tuple, arrived)) != sorted(map(tuple, together)):
        raise Hint(
            f"{where}: these rows are not those of this rank's experts: sort them by expert before you send them"
        )
    start = 0
    for e, rows in enumerate(expected):
        mine = arrived[start : start + len(rows)]
        if sorted(map(tuple, mine)) != sorted(map(tuple, rows)):
            raise Hint(
                f"{where}: rows of other experts are among those of expert {e}: what arrives is in the order of the "
                "source ranks; sort it by expert"
            )
        start += len(rows)
    raise Hint(
        f"{where}: the rows of an expert are not in the order (source rank, place there): sort with kind='stable', so "
        "that the sums have one order and the bits are those of one device"
    )
