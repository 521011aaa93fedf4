"""Grader of exercise 14, the online softmax."""

import numpy as np

from chapters.exercises.grading import call, expect, random, require

QUERIES, WIDTH = 5, 4
SOLVED = "Attention over all keys needs the scores of one block at a time (section 11.1)."


def stream(blocks):
    """Yield blocks, each with keys and values that are overwritten when the next one is asked for."""
    for block in blocks:
        k, v, allowed = (array.copy() for array in block)
        yield k, v, allowed
        k[...] = v[...] = 0


def one_softmax(q, blocks):
    """Return the output and the log-sum-exp over all keys of the blocks at once."""
    k, v, allowed = (np.concatenate([block[i] for block in blocks], axis=i // 2) for i in range(3))
    scores = np.where(allowed, q @ k.T / WIDTH**0.5, -np.inf)
    top = scores.max(1, keepdims=True)
    p = np.exp(scores - top)
    return p @ v / p.sum(1, keepdims=True), (top + np.log(p.sum(1, keepdims=True)))[:, 0], top[:, 0]


def without_scaling(q, blocks):
    """Return the output if sums over blocks with different maxima are added as they are."""
    total, weights = np.zeros((QUERIES, WIDTH)), np.zeros((QUERIES, 1))
    for k, v, allowed in blocks:
        scores = np.where(allowed, q @ k.T / WIDTH**0.5, -np.inf)
        top = scores.max(1, keepdims=True)
        p = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total, weights = total + p @ v, weights + p.sum(1, keepdims=True)
    return total / weights


@np.errstate(all="ignore")
def running(q, blocks, of_output=1, of_sum=1, divide=True):
    """Return the output of a running maximum whose factors e^(old - new) have these powers: 0 rescales nothing."""
    out, total, top = np.zeros((QUERIES, WIDTH)), np.zeros((QUERIES, 1)), np.full((QUERIES, 1), -np.inf)
    for k, v, _ in blocks:
        scores = q @ k.T / WIDTH**0.5
        new = np.maximum(top, scores.max(1, keepdims=True))
        grown = np.where(np.isfinite(top), new - top, 0)
        p = np.exp(scores - new)
        out = out * np.exp(-of_output * grown) + p @ v
        total = total * np.exp(-of_sum * grown) + p.sum(1, keepdims=True)
        top = new
    return out / total if divide else out


def case(key, lengths, masked, strength):
    """Return queries and blocks. If `masked`, every query sees other keys, and the first one none of block 0."""
    generator = random(key)
    q = strength * generator.normal(size=(QUERIES, WIDTH))
    blocks = []
    for place, length in enumerate(lengths):
        k, v = generator.normal(size=(2, length, WIDTH))
        allowed = generator.random((QUERIES, length)) < 0.6 if masked else np.ones((QUERIES, length), bool)
        allowed[0] &= place > 0 or not masked
        allowed[:, -1] |= place == len(lengths) - 1
        blocks.append((k, v, allowed))
    return q, blocks


def grade(solution):
    for key, (lengths, masked, strength) in enumerate(
        [
            ((6,), False, 1),
            ((4, 4), False, 1),
            ((3, 1, 5, 2, 2, 4), False, 1),
            ((3, 5, 2), True, 1),
            ((4, 6), False, 800),
        ]
    ):
        q, blocks = case(key, lengths, masked, strength)
        where = f"blocks of {', '.join(map(str, lengths))} keys{', some not allowed' if masked else ''}"
        out, lse, top = one_softmax(q, blocks)
        each = [one_softmax(q, [block])[:2] for block in blocks] if not masked else []
        with np.errstate(all="ignore"):
            result = call(solution, solution.online_attention, q.copy(), stream(blocks))
        require(isinstance(result, tuple) and len(result) == 2, f"{where}: return the output and the log-sum-exp")
        if not all(np.isfinite(part).all() for part in result):
            require(masked, f"{where}: not finite, e^score overflows: subtract the maximum that is known so far")
            require(False, f"{where}: not finite; a query may see no key of a block, where -inf - (-inf) is no number")
        mistakes = {
            "a block's sum has its own maximum as unit: scale the sums so far, or the block's, before you add them": (
                without_scaling(q, blocks)
            ),
            "it is 0: a block's arrays are used again for the next one, so use them before you ask for the next; or "
            "you multiply the new block by e^(old - new) too, which is 0 for the first one": np.zeros_like(out),
        }
        if each:
            grows = "when the maximum grows, multiply the output and the sum so far by e^(old maximum - new maximum)"
            mistakes |= {
                f"the old sums are not rescaled: {grows}": running(q, blocks, 0, 0),
                f"the old output is not rescaled, the sum of the weights is: {grows}": running(q, blocks, 0, 1),
                f"the old sum of the weights is not rescaled, the output is: {grows}": running(q, blocks, 1, 0),
                f"the old sums are multiplied by the inverse: {grows}": running(q, blocks, -1, -1),
                "at the end divide the output by the sum of the weights": running(q, blocks, divide=False),
                "this is the mean of the blocks' outputs: weigh them with their sums": sum(o for o, _ in each)
                / len(each),
                "this is the sum of the blocks' outputs: weigh them with their sums": sum(o for o, _ in each),
                "this is the last block's output: merge it with what came before": each[-1][0],
            }
        if not masked:
            everyone = one_softmax(q * WIDTH**0.5, blocks)[0]
            mistakes["divide the scores by the square root of the width"] = everyone
        else:
            everyone = one_softmax(q, [(k, v, np.ones_like(allowed)) for k, v, allowed in blocks])[0]
            mistakes["keys that are not allowed count"] = everyone
        expect(result[0], out, f"{where}, output", mistakes)
        hints = {"the maximum is missing: it is the maximum plus the logarithm of the sum": lse - top}
        expect(result[1], lse, f"{where}, log-sum-exp", hints)
