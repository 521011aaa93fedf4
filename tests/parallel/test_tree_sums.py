"""Claims about sums as trees: neighbours are added first, and leaves are as many as every size can be cut into."""

import numpy as np
import pytest

from minipar.more.llama import LlamaConfig
from minipar.more.tree import tree_sums as tree
from minipar.nn import GPTConfig

RANDOM = np.random.Generator(np.random.Philox(17))


def halves(dtype, *shape):
    """Return values whose products and sums are exact, also in float32."""
    return (RANDOM.integers(-8, 9, shape) / 2).astype(dtype)


def test_a_tree_adds_neighbours_first():
    """2^53 + 1 is rounded to 2^53: the bits tell the order."""
    big = 2.0**53
    assert tree.tree_sum(np.array([big, 1.0, 1.0, 1.0])) == big + 2
    assert tree.tree_sum(np.array([1.0, 1.0, big, 1.0])) == big + 2
    assert tree.tree_sum(np.array([[3.0, 4.0]])).tolist() == [3.0, 4.0]
    assert tree.column_sums(np.array([[big, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]]), 2).tolist() == [big + 2, 10.0]


@pytest.mark.parametrize(("leaves", "groups"), [(1, 1), (2, 3), (4, 1)])
def test_products_by_leaves_are_the_products(leaves, groups):
    a, b = halves("float32", 5, 7), halves("float32", 7, 12)
    product = tree.multiply_by_leaves(a, b, leaves, groups)
    assert product.dtype == np.float32 and np.array_equal(product, a @ b)
    c, d = halves("float32", 5, 12), halves("float32", 7, 12)
    assert np.array_equal(tree.multiply_as_tree(c, d, leaves, groups), c @ d.T)


@pytest.mark.parametrize(
    ("config", "length", "leaves"),
    [
        (GPTConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=8), 8, 8),
        (GPTConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=8), 12, 4),
        (GPTConfig(vocab_size=18, n_positions=8, n_embd=16, n_layer=1, n_head=8), 8, 2),
        (GPTConfig(vocab_size=16, n_positions=8, n_embd=12, n_layer=1, n_head=3), 8, 1),
        (LlamaConfig(16, 16, 16, 1, 8, 2, 8), 8, 2),
        (LlamaConfig(16, 16, 12, 1, 8, 8, 8), 8, 4),
    ],
)
def test_the_leaves_are_the_largest_power_that_divides_all(config, length, leaves):
    """It divides the heads, the heads of keys, the MLP's columns, the vocabulary and the tokens: each may decide."""
    assert tree.leaf_count(config, length) == leaves
