"""Grader of exercise 3, recursive doubling for any number of ranks."""

from chapters.exercises.grading import Hint, NotWritten, expect, on_ranks, random, require

SIZE = 6
SOLVED = "A rank sends at most lg p + 1 messages, where the ring sends 2(p-1) of n/p elements each (section 3.4)."


def grade(solution):
    for ranks in (1, 2, 4, 8, 3, 5, 6, 7):
        power = 1 << (ranks.bit_length() - 1)
        arrays = [random(ranks, rank).normal(size=SIZE) for rank in range(ranks)]

        def program(comm, arrays=arrays):
            x = arrays[comm.rank].copy()
            result = solution.all_reduce(comm, x)
            unchanged = bool((x == arrays[comm.rank]).all()) and result is not x
            return result, unchanged, comm.traffic.messages(), comm.traffic.bytes() // 8

        try:
            results = on_ranks(solution, ranks, program)
        except NotWritten:
            raise
        except Hint as hint:
            if ranks in (1, 2, 4, 8):
                partners = "partners must name each other: rank ^ distance does, rank + distance does not; "
                partners += "and each must start to receive before it waits for its send"
                raise Hint(f"{ranks} ranks, a power of two: {partners}.\n{hint}") from None
            raise Hint(
                f"{ranks} ranks: right for powers of two only. The {ranks - power} ranks from {power} on give their "
                f"x to a rank below {power} before the rounds, and get the result from it afterwards.\n{hint}"
            ) from None
        for rank, (result, unchanged, messages, sent) in enumerate(results):
            where = f"rank {rank} of {ranks}"
            pairs = sum(arrays[:power])
            mistakes = {
                "this is your own x: a rank that is left over must receive the result at the end": arrays[rank],
                f"the sum of the first {power} ranks only: the ranks that are left over are not counted": pairs,
            }
            if ranks == 2:
                mistakes["this is your partner's x: add what arrives to what you have"] = arrays[1 - rank]
            if ranks == power and ranks > 2:
                first = arrays[rank] + sum(arrays[rank ^ 1 << k] for k in range(power.bit_length() - 1))
                mistakes["all is counted twice: the distances double from round to round, 1, 2, 4"] = 2 * sum(arrays)
                mistakes["you send x in every round: send the running sum"] = first
            expect(result, sum(arrays), where, mistakes)
            require(unchanged, f"{where}: x has changed, or is the result; add into an array of your own")
            most = power.bit_length()
            require(messages <= most, f"{where}: it sends {messages} messages, at most {most} are needed")
            require(sent == messages * SIZE, f"{where}: {messages} messages have {sent} elements, expected {SIZE} each")
        bits = {result.tobytes() for result, *_ in results}
        require(len(bits) == 1, f"{ranks} ranks: the ranks' results differ in their last bits")
