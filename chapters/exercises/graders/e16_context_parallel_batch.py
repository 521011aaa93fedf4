"""Grader of exercise 16, tokens, positions and the mean loss under context parallelism."""

import numpy as np

from chapters.exercises.grading import Hint, call, expect, on_ranks, random, require

SOLVED = "Positions, targets and the mean are those of one device, though the tokens are cut (section 11.8)."


def places(r, c, length, zig_zag=True):
    """Return the positions of rank r's tokens."""
    chunks = np.arange(length).reshape(2 * c, -1)
    return chunks[[r, 2 * c - 1 - r] if zig_zag else [2 * r, 2 * r + 1]].reshape(-1)


def grade_parts(solution, c):
    length = 2 * c * 3
    tokens = random(c).permutation(length + 1) + 100
    for r in range(c):
        where = f"rank {r} of {c}, T = {length}"
        result = call(solution, solution.own_part, tokens.copy(), r, c)
        require(isinstance(result, tuple) and len(result) == 3, f"{where}: return inputs, targets and positions")
        inputs, targets, positions = result
        own, contiguous = places(r, c, length), places(r, c, length, False)
        order = "this is contiguous order: rank r holds the chunks r and 2c - 1 - r"
        late_first = "the late chunk comes first: the order is r, then 2c - 1 - r"
        swapped = np.roll(own, 3)
        inputs_of = {order: tokens[contiguous], late_first: tokens[swapped]}
        strided = np.arange(length).reshape(2 * c, -1)[[r, c + r]].reshape(-1)
        inputs_of["the second chunk is r + c: it is 2c - 1 - r, counted from the end"] = tokens[strided]
        expect(inputs, tokens[own], f"{where}, inputs", inputs_of)
        cut_first = np.concatenate([np.roll(tokens[chunk], -1) for chunk in np.split(own, 2)])
        hint = "a target is taken from the own tokens: the next token may be on another rank, so shift first, then cut"
        expect(
            targets,
            tokens[own + 1],
            f"{where}, targets",
            {
                hint: (np.roll(tokens[own], -1), cut_first, np.append(tokens[own][1:], tokens[own[-1] + 1])),
                "these are the tokens before the inputs: a target is the token after its input": tokens[own - 1],
                "these are the inputs: a target is the token after its input": tokens[own],
            },
        )
        hint = "they are counted from 0 on this rank: a token's position is its place in the sample"
        each = "they are counted from 0 in each chunk: a token's position is its place in the sample"
        expect(positions, own, f"{where}, positions", {hint: np.arange(len(own)), each: own % 3})
    if c > 1:
        length += 1
        try:
            solution.own_part(np.arange(length + 1), 0, c)
        except ValueError as error:
            named = str(length) in str(error) and str(2 * c) in str(error)
            require(named, f"T = {length}, c = {c}: the message must name {length} and {2 * c}: {error}")
        except Exception as error:
            raise Hint(f"T = {length}, c = {c}: raise a ValueError, not {type(error).__name__}") from None
        else:
            raise Hint(f"T = {length} tokens do not make {2 * c} equal chunks: raise a ValueError")


def grade(solution):
    for c in (1, 2, 3, 4):
        grade_parts(solution, c)
        losses, counts = random(c, 1).uniform(10, 90, size=c), np.array([40, 8, 0, 25])[:c]
        gradients = random(c, 2).normal(size=(c, 4)) * counts[:, None]
        losses[counts == 0] = 0

        def program(comm, losses=losses, gradients=gradients, counts=counts):
            own = comm.rank
            return solution.mean_over_ranks(comm, float(losses[own]), gradients[own].copy(), int(counts[own]))

        with np.errstate(invalid="ignore", divide="ignore"):
            results = on_ranks(solution, c, program)
        own = np.maximum(counts, 1)
        for rank, result in enumerate(results):
            where = f"rank {rank} of {c}, tokens {counts.tolist()}"
            require(isinstance(result, tuple) and len(result) == 2, f"{where}: return the loss and its gradient")
            for what, value, sums in (("loss", result[0], losses), ("gradient", result[1], gradients)):
                right, each = sums.sum(0) / counts.sum(), (sums.T / own).T
                times = (
                    f"it is c = {c} times too large: divide by the tokens of all ranks, once, and multiply by nothing"
                )
                require(
                    bool(np.isfinite(value).all()), f"{where}, {what}: not finite; a rank may have no tokens that count"
                )
                mistakes = {
                    times: c * right,
                    "this is the sum of the ranks' means: divide by the tokens of all ranks": each.sum(0),
                    "this is the mean of the ranks' means: a token on a rank with few tokens weighs too much": (
                        each.mean(0)
                    ),
                    "divided by the ranks once more: the tokens of all ranks are counted already": right / c,
                    "these are this rank's tokens only: sum over the ranks": each[rank],
                    "it is divided by the tokens of all ranks, but not summed over the ranks": sums[rank]
                    / counts.sum(),
                    "this is the sum: divide it by the tokens of all ranks": sums.sum(0),
                    "the sum over the ranks is divided by this rank's tokens": sums.sum(0) / own[rank],
                }
                alone = {"this is the sum: divide it by the tokens that count": sums.sum(0)}
                expect(value, right, f"{where}, {what}", mistakes if c > 1 else alone)
