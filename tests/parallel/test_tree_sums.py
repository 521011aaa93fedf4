"""Claims about layers whose sums are trees: the elements of a leaf, the dtypes, and what a rank without rows adds."""

import numpy as np
import pytest

from minipar.autograd import Tensor
from minipar.nn import GPTConfig, LlamaConfig
from minipar.parallel import tree

RANDOM = np.random.Generator(np.random.Philox(17))


def halves(dtype, *shape):
    """Return values whose products and sums are exact, also in float32."""
    return (RANDOM.integers(-8, 9, shape) / 2).astype(dtype)


def gradients(y, dy, *tensors):
    y.backward(dy)
    return [tensor.grad for tensor in tensors]


def parameter(array):
    return Tensor(array, requires_grad=True)


def test_columns_are_cut_into_neighbours_unless_groups_are_given():
    matrix = np.arange(16).reshape(2, 8)
    assert tree.cut(matrix, 4).tolist() == [
        [[0, 1], [8, 9]],
        [[2, 3], [10, 11]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]
    assert np.array_equal(tree.join(tree.cut(matrix, 4)), matrix)
    assert tree.cut(matrix, 2, 2)[1].tolist() == [[2, 3, 6, 7], [10, 11, 14, 15]]


def test_a_tree_adds_neighbours_first():
    """2^53 + 1 is rounded to 2^53: the bits tell the order."""
    big = 2.0**53
    assert tree.tree_sum(np.array([big, 1.0, 1.0, 1.0])) == big + 2
    assert tree.tree_sum(np.array([1.0, 1.0, big, 1.0])) == big + 2
    assert tree.tree_sum(np.array([[3.0, 4.0]])).tolist() == [3.0, 4.0]
    assert tree.column_sums(np.array([[big, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]]), 2).tolist() == [big + 2, 10.0]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_products_by_leaves_are_the_products(leaves, groups):
    a, b = halves("float32", 5, 7), halves("float32", 7, 12)
    right = a @ b
    product = tree.multiply_by_leaves(a, b, leaves, groups)
    assert product.dtype == np.float32 and np.array_equal(product, right)
    c, d = halves("float32", 5, 12), halves("float32", 7, 12)
    assert np.array_equal(tree.multiply_as_tree(c, d, leaves, groups), c @ d.T)
    assert np.array_equal(tree.multiply_by_leaves(a, b, leaves), right)
    assert np.array_equal(tree.multiply_as_tree(c, d, leaves), c @ d.T)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposed", [False, True])
def test_layers_of_leaves_have_one_layers_gradients(transposed, dtype):
    """In a column layer and a row layer; each gradient is in new memory, row after row, in the dtype of the layer."""
    x, dy = halves(dtype, 2, 3, 4), halves(dtype, 2, 3, 8)
    w = halves(dtype, 4, 8)
    bias = halves(dtype, 8)
    flat_x, flat_dy = x.reshape(6, 4), dy.reshape(6, 8)
    given = w.T.copy() if transposed else w
    for layer in ("column", "row"):
        own, weight, added = parameter(x), parameter(given), parameter(bias)
        if layer == "column":
            y = tree.column_linear(own, weight, added, transposed, 2)
        else:
            y = tree.row_linear(own, weight, transposed, 2)
        assert y.dtype == dtype
        assert np.array_equal(y.data, x @ w + (bias if layer == "column" else 0))
        dx, dweight = gradients(y, dy, own, weight)
        expected = flat_x.T @ flat_dy
        assert dx.dtype == dweight.dtype == dtype and dweight.flags.c_contiguous
        assert np.array_equal(dx, dy @ w.T)
        assert np.array_equal(dweight, expected.T if transposed else expected)
        if layer == "column":
            assert np.array_equal(added.grad, flat_dy.sum(axis=0))


@pytest.mark.parametrize("own", [[], [2], [0, 3], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("into", [False, True])
def test_a_rank_looks_up_its_own_rows_alone(own, into):
    """It has no token, one, some or all. Gradients of other rows are zero, also in memory that held something else."""
    weight = parameter(halves("float32", 4, 3))
    index = np.array([[3, 0, 1], [1, 3, 2]])
    is_own = np.zeros(6, bool)
    is_own[own] = True
    buffer = np.full((4, 3), np.nan, np.float32)
    if into:
        weight.grad_buffer = buffer
    y = tree.own_rows(weight, index, is_own.reshape(2, 3))
    dy = halves("float32", 2, 3, 3)
    (gradient,) = gradients(y, dy, weight)
    rows, expected = np.zeros((6, 3), np.float32), np.zeros((4, 3), np.float32)
    for token in own:
        rows[token] = weight.data[index.reshape(-1)[token]]
        expected[index.reshape(-1)[token]] += dy.reshape(6, 3)[token]
    assert y.dtype == gradient.dtype == np.float32
    assert np.array_equal(y.data.reshape(6, 3), rows) and np.array_equal(gradient, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_positions_that_documents_repeat_are_added_up(dtype):
    weight = parameter(halves(dtype, 4, 3))
    index = np.array([[0, 1, 2, 3], [0, 0, 1, 0]])
    y = tree.position_rows(weight, index, 2)
    dy = halves(dtype, 2, 4, 3)
    (gradient,) = gradients(y, dy, weight)
    expected = np.zeros((4, 3), dtype)
    np.add.at(expected, index, dy)
    assert np.array_equal(y.data, weight.data[index])
    assert gradient.dtype == dtype and np.array_equal(gradient, expected)


def test_a_bias_and_tokens_are_added_as_trees_of_each_sequence():
    x = halves("float32", 2, 4, 3)
    bias = parameter(halves("float32", 3))
    own = parameter(x)
    y = tree.plus_bias(own, bias, 2)
    dy = halves("float32", 2, 4, 3)
    dx, dbias = gradients(y, dy, own, bias)
    assert np.array_equal(y.data, x + bias.data)
    assert np.array_equal(dx, dy) and np.array_equal(dbias, dy.sum(axis=(0, 1)))
    big = 2.0**53
    tokens = np.array([[[big], [1.0], [1.0], [1.0]]])  # one sequence: ((big + 1) + (1 + 1))
    assert tree.token_sums(tokens, 4).tolist() == [big + 2]
    assert tree.token_sums(tokens, 1).tolist() == [tokens.sum()]


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
