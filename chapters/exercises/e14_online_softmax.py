"""Exercise 14 (chapter 11): attention over blocks of keys that come one after the other.

The keys and values of some queries come in blocks, and only one block is there at a time: its arrays are used again
for the next one. Return the output of attention over all keys, and the log-sum-exp of each query's scores.

A score is q . k / sqrt(width). `allowed` says which keys of a block a query may see. A query may see none of a block,
also not of the first one; over all blocks it sees at least one. Scores can be so large that e^score is infinite.

Graded on 1 to 6 blocks of different lengths, against a softmax over all keys at once.
"""

from collections.abc import Iterator

import numpy as np

Block = tuple[np.ndarray, np.ndarray, np.ndarray]  # k (keys, width), v (keys, width), allowed (queries, keys)


def online_attention(q: np.ndarray, blocks: Iterator[Block]) -> tuple[np.ndarray, np.ndarray]:
    """Return the output, (queries, width), and the log-sum-exp, (queries,). q: (queries, width)."""
    raise NotImplementedError("your code")
