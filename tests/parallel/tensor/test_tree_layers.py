"""Claims about layers whose sums are trees: they compute what the serial layers do, also of arrays and in sequences."""

import numpy as np
import pytest

from minipar.autograd import Tensor
from minipar.comm import run_local, serial
from minipar.nn import Linear
from minipar.nn.layers import Embedding, LayerNorm
from minipar.parallel.tensor import tree_layers
from minipar.parallel.tensor.layers import Border
from minipar.parallel.tensor.mappings import TensorGroup

RANDOM = np.random.Generator(np.random.Philox(23))


def border(leaves=2, sequence=False):
    return Border(TensorGroup(serial(), "tree", tree_leaves=leaves), sequence)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"bias": False}])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_takes_arrays_and_tensors_alike(kind, options, dtype):
    layer = Linear(8, 12, name="a", dtype=dtype, std=0.5, **options)
    if layer.bias is not None:
        layer.bias.data[...] = np.arange(12)
    x = RANDOM.standard_normal((2, 4, 8))
    expected = layer(x)
    if kind == "column":
        made = tree_layers.TreeColumnLinear(layer, border(), 3)
    else:
        made = tree_layers.TreeRowLinear(layer, border())
    for given in (x, Tensor(x.astype(dtype))):
        y = made(given)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.data, expected.data, rtol=1e-4 if dtype == "float32" else 1e-13)


def test_a_rank_of_a_sequence_has_its_share_of_token_leaves():
    def rank(comm):
        group = TensorGroup(comm, "tree", tree_leaves=8)
        return group.leaves, [tree_layers.token_leaves(Border(group, sequence)) for sequence in (True, False)]

    assert run_local(4, rank) == [(2, [2, 8])] * 4
    assert run_local(1, rank) == [(8, [8, 8])]
    assert TensorGroup(serial()).leaves == 0, "without trees"


def test_a_column_layers_groups_are_cut_one_by_one():
    """A leaf has columns of q, of k and of v, so the sums of the input's gradient have other bits."""
    layer = Linear(4, 12, name="a", dtype="float64", std=0.5)
    gradients = []
    columns = np.arange(12.0) / 7
    for groups, leaves in (
        (1, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (3, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
    ):
        x = Tensor(np.ones((1, 2, 4)), requires_grad=True)
        made = tree_layers.TreeColumnLinear(layer, border(4), groups)
        made(x).backward(np.tile(columns, (1, 2, 1)))
        products = [columns[own] @ layer.weight.data[:, own].T for own in leaves]
        expected = (products[0] + products[1]) + (products[2] + products[3])
        np.testing.assert_allclose(x.grad[0, 0], expected, rtol=1e-14)
        gradients.append(x.grad)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-13)


def test_positions_are_looked_up_once_or_for_each_document():
    layer = Embedding(4, 3, name="a", dtype="float64", std=0.5)
    made = tree_layers.TreePositionEmbedding(layer, border())
    for index in (np.arange(4), np.array([[0, 1, 0, 1], [0, 1, 2, 3]])):
        layer.weight.grad = None
        y = made(index)
        assert np.array_equal(y.data, layer.weight.data[index])
        y.backward(np.ones(y.shape))
        counts = np.bincount(index.reshape(-1), minlength=4)
        assert np.array_equal(layer.weight.grad, np.repeat(counts[:, None], 3, axis=1))


def test_the_head_multiplies_by_the_embedding():
    x = RANDOM.standard_normal((1, 2, 4))
    weight = RANDOM.standard_normal((6, 4))
    y = tree_layers.head(Tensor(x), Tensor(weight), border())
    np.testing.assert_allclose(y.data, x @ weight.T, rtol=1e-13)


def test_norms_of_a_model_add_up_the_gradients_of_all_tokens():
    layer = LayerNorm(4, dtype="float64")
    model = LayerNorm(4, dtype="float64")
    x, dy = RANDOM.standard_normal((2, 4, 4)), RANDOM.standard_normal((2, 4, 4))
    tree_layers.use_trees(model, border())
    results = []
    for each in (layer, model):
        given = Tensor(x, requires_grad=True)
        y = each(given)
        y.backward(dy)
        results.append((y.data, given.grad, each.weight.grad, each.bias.grad))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)
