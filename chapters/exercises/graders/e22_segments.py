"""Grader of exercise 22, recompute in segments."""

import weakref

import numpy as np

from chapters.exercises.grading import Hint, call, random, require

ROWS, HIDDEN = 3, 4
N = ROWS * HIDDEN  # elements of a block's input
S = 2 * N  # elements that a block saves
SOLVED = "The best segments keep the fewest elements alive, for one more forward of each block (section 2.8)."


class Saved:
    """What a block saves: its input and its tanh."""

    def __init__(self, x, y):
        self.x, self.y = x.copy(), y.copy()


class Ledger:
    """The results and the saved values that are alive, and the most of both at the beginning of a backward."""

    def __init__(self):
        self.results = self.saved = self.peak = 0
        self.at_peak = (0, 0)

    def watch(self, thing, kind):
        self.count(kind, 1)
        weakref.finalize(thing, self.count, kind, -1)
        return thing

    def count(self, kind, change):
        setattr(self, kind, getattr(self, kind) + change)

    def look(self):
        elements = N + self.results * N + self.saved * S  # the first N: x, the first segment's input
        if elements > self.peak:
            self.peak, self.at_peak = elements, (1 + self.results, self.saved)


class Watched:
    """A block, y = tanh(x @ weight), that counts its forwards and what it has made."""

    def __init__(self, number, ledger):
        self.number, self.ledger, self.forwards = number, ledger, 0
        self.weight = random(22, number).normal(size=(HIDDEN, HIDDEN))
        self.gradient = np.zeros((HIDDEN, HIDDEN))

    def forward(self, x):
        self.forwards += 1
        return self.ledger.watch(np.tanh(x @ self.weight), "results")

    def forward_and_save(self, x):
        y = self.forward(x)
        return y, self.ledger.watch(Saved(x, y), "saved")

    def backward(self, saved, dy):
        require(isinstance(saved, Saved), "backward(saved, dy): saved is what forward_and_save returned second")
        self.ledger.look()
        u = dy * (1 - saved.y * saved.y)
        self.gradient += saved.x.T @ u
        return u @ self.weight.T


def peak(L, n, s, k):
    starts = range(0, L, k)
    return max((j + 1) * n + min(k, L - start) * s + n for j, start in enumerate(starts))


def last_peak(L, n, s, k):
    """Return the elements that are alive while the last segment goes back, which need not be the most."""
    last = (L - 1) // k
    return (last + 1) * n + (L - last * k) * s + n


def run(blocks, x, dy):
    """Run a step that saves everything."""
    kept = []
    for block in blocks:
        x, saved = block.forward_and_save(x)
        kept.append(saved)
    for block, saved in zip(blocks[::-1], kept[::-1], strict=True):
        dy = block.backward(saved, dy)
    return dy


def grade(solution):
    x, dy = random(1).normal(size=(2, ROWS, HIDDEN))
    for L, k in ((4, 2), (1, 1), (6, 1), (6, 6), (9, 3), (8, 3), (7, 5)):
        where = f"{L} blocks in segments of {k}"
        ledger = Ledger()
        right = [Watched(number, Ledger()) for number in range(L)]
        blocks = [Watched(number, ledger) for number in range(L)]
        expected, found = run(right, x, dy), call(solution, solution.step, blocks, x.copy(), dy.copy(), k)
        for number, (block, other) in enumerate(zip(blocks, right, strict=True)):
            if not np.array_equal(block.gradient, other.gradient):
                raise Hint(
                    f"{where}: block {number} has a wrong gradient. Does the second forward of its segment begin with "
                    "the segment's input, and does backward take the last block first, each with its own saved values?"
                )
        require(np.array_equal(found, expected), f"{where}: return the gradient of x, what the first block returns")
        most = max(block.forwards for block in blocks)
        require(
            most <= 2,
            f"{where}: a block's forward runs {most} times, at most 2 are needed: begin with the segment's input, not "
            "with x, and keep what the blocks of a segment save until they have gone back",
        )
        results, saved = ledger.at_peak
        limit = peak(L, N, S, k)
        reason = (
            "keep the inputs of segments and no other result, neither between them nor the last one of forward (del), "
            "and drop a segment's input when its backward is done"
        )
        if saved > k:
            reason = f"the first forward must save nothing, and a segment of {k} blocks nothing of another one"
        require(
            ledger.peak <= limit,
            f"{where}: {ledger.peak} elements are alive, at most {limit}: {results} inputs and results of {N}, and "
            f"what {saved} blocks saved, {S} each; {reason}",
        )
    for L, n, s in ((1, 1, 1), (97, 5, 14), (16, 4, 4), (24, 1, 20), (24, 20, 1), (100, 3, 3)):
        best = min(range(1, L + 1), key=lambda k, L=L, n=n, s=s: peak(L, n, s, k))
        k = call(solution, solution.best_segment, L, n, s)
        where = f"best_segment({L}, {n}, {s})"
        require(isinstance(k, int) and 1 <= k <= L, f"{where}: {k!r} is no whole number from 1 to {L}")
        if k != best:
            ours, least = peak(L, n, s, k), peak(L, n, s, best)
            reason = "The last segment may be shorter: try each k"
            if ours == least:
                reason = "Of several take the smallest"
            elif k == min(range(1, L + 1), key=lambda k, L=L, n=n, s=s: last_peak(L, n, s, k)):
                reason = (
                    "The largest peak may be one segment earlier, if the last is shorter: take the maximum over all j"
                )
            raise Hint(f"{where}: {k}, with a peak of {ours}; {best} has {least}. {reason}")
