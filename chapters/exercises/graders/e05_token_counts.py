"""Grader of exercise 5, the gradient of the mean over all tokens."""

import numpy as np

from chapters.exercises.grading import expect, on_ranks, random, require

TOKENS = ((100, 30), (28, 5), (0, 0), (7, 0), (64, 64))
SOLVED = "Each token weighs the same, whichever rank and microbatch it is in (section 4.6)."


def mean(gradients, tokens):
    """Return the gradient of the mean, and 0 without tokens."""
    return gradients.sum(0) / max(tokens.sum(), 1)


def grade(solution):
    for ranks in (1, 3, 2, 5):
        tokens = np.array(TOKENS[:ranks])
        gradients = random(ranks).normal(size=(ranks, 2, 4)) * tokens[:, :, None]

        def program(comm, gradients=gradients, tokens=tokens):
            result = solution.gradient_of_mean(comm, gradients[comm.rank].copy(), tokens[comm.rank].copy())
            return result, comm.traffic.messages("all_reduce")

        with np.errstate(invalid="ignore", divide="ignore"):
            results = on_ranks(solution, ranks, program)
        own = [mean(g, n) for g, n in zip(gradients, tokens, strict=True)]
        each = np.where(tokens[:, :, None] > 0, gradients / np.maximum(tokens, 1)[:, :, None], 0)
        for rank, (result, _) in enumerate(results):
            require(
                result is None or bool(np.isfinite(result).all()),
                f"rank {rank} of {ranks}: NaN; a rank without tokens must not divide by its own count",
            )
            expect(
                result,
                mean(gradients.reshape(-1, 4), tokens.reshape(-1)),
                f"rank {rank} of {ranks}, tokens {tokens.tolist()}",
                {
                    "this is the mean of the ranks' means: a token on a rank with few tokens weighs too much": sum(own)
                    / ranks,
                    "this is the sum of the ranks' means: a token on a rank with few tokens weighs too much": sum(own),
                    "this is the mean of the microbatches' means (the mistake of gradient accumulation in 2024): "
                    "add sums, divide once": each.mean((0, 1)),
                    "this is the sum of the microbatches' means: add sums, divide once": each.sum((0, 1)),
                    "divided by the number of ranks once more: the tokens of all ranks are counted already": mean(
                        gradients.reshape(-1, 4), tokens.reshape(-1)
                    )
                    / ranks,
                    "this is the gradient of the sum: divide it by the tokens of all ranks": gradients.sum((0, 1)),
                    "divided by the microbatches once more: the tokens of all of them are counted already": mean(
                        gradients.reshape(-1, 4), tokens.reshape(-1)
                    )
                    / tokens.shape[1],
                    "this is divided by the number of microbatches: divide by the number of tokens": gradients.sum(
                        (0, 1)
                    )
                    / tokens.size,
                    "these are this rank's tokens only: sum gradients and counts over the ranks": own[rank],
                    "the gradients are summed over the ranks, but divided by this rank's tokens": gradients.sum((0, 1))
                    / max(tokens[rank].sum(), 1),
                },
            )
        most = 2 * 2 * (ranks - 1)
        require(all(sent <= most for _, sent in results), f"{ranks} ranks: more than two all-reduces")
