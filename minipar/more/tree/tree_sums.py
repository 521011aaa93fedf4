"""Sums whose bits do not depend on the layout: balanced trees over leaves that no rank count changes.

An addition of floats rounds its result, so a sum's bits depend on the order of the additions, but
not on which rank does them, nor on which of two terms comes first: a + b = b + a to the bit. With
trees each sum over what ranks may share has K leaves, a power of two, and this order:

    ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))

    1 rank      adds all of it
    2 ranks     add l0 to l3 and l4 to l7, and then these two sums
    4 ranks     add l0 + l1, l2 + l3, l4 + l5, l6 + l7, and then these four sums as a tree

A rank that holds neighbouring leaves adds a whole subtree (`tree_sum`). The algorithm "tree" of
tree_collectives.py adds the ranks' subtrees to the same tree, so 1, 2, 4 and 8 ranks get the same
bits. A matrix product adds, too, in an order that the library chooses by the matrices' shapes. So
each product is computed leaf by leaf, as products of shapes that all layouts have. The leaves:

    batch       the microbatches of all replicas: their gradients and losses (leaves.py)
    features    K equal blocks of the dim that tensor parallelism splits: columns of a column layer,
                rows of a row layer, the vocabulary. Whoever computes several of them computes each
                by itself. Where they are terms of a sum (the result of a row layer, a column
                layer's gradient of its input, the softmax of the vocabulary) they add up as a tree.
    tokens      K equal blocks of each sequence, of which sequence parallelism gives a rank some:
                the gradients of norms and of row layers' biases
    norm        none: no rounding of the sum of the squares depends on an order (exact_norm.py)

Attention computes each head by itself anyhow, and all else works on rows or on single elements. So
the layers of tensor parallelism, which ask this file for their products and sums, compute on one
device too, whose group has one rank. What cannot have the same bits is refused (train/tree_trainer.py).
NB: Villa et al. 2009 sum a fixed tree for the same reason; Demmel and Nguyen 2013 sum exactly.

Seams of the core: none. tree_layers.py and tree_collectives.py fill them.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

from minipar.autograd.fused import _LayerNorm, as_rows, getter, product
from minipar.autograd.rules import Gradient, Gradients, LazyGradient, Result, add_rows
from minipar.autograd.tensor import Function, Tensor, operation, record
from minipar.backend import Array, xp
from minipar.more.llama import RMSNorm
from minipar.nn.gpt import TransformerConfig
from minipar.nn.layers import LayerNorm


def leaf_count(model: TransformerConfig, length: int) -> int:
    """Return K, the leaves of features and of tokens: the largest power of two that divides all of them.

    The model and the length of its sequences decide it, and so the largest tp.
    """
    common = gcd(model.n_head, model.n_kv_head, model.n_inner, model.vocab_size, length)
    leaves = 1
    while common % (2 * leaves) == 0:
        leaves *= 2
    return leaves


def tree_sum(terms: Array) -> Array:
    """Add up terms[0], terms[1], ... as a balanced tree; their number is a power of two."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


# ---- matrices in leaves --------------------------------------------------------------------------


def cut(matrix: Array, leaves: int, groups: int = 1) -> Array:
    """Cut the columns into leaves: (n, c) -> (leaves, n, c / leaves).

    Each of `groups` equal stretches of columns is cut by itself; a leaf has its part of each.
    """
    rows, columns = matrix.shape
    width = columns // (groups * leaves)
    blocks = matrix.reshape(rows, groups, leaves, width)
    return blocks.transpose(2, 0, 1, 3).reshape(leaves, rows, groups * width)


def join(blocks: Array, groups: int = 1) -> Array:
    """Put leaves of columns next to each other, the inverse of `cut`: (leaves, n, w) -> (n, leaves w)."""
    leaves, rows, width = blocks.shape
    separate = blocks.reshape(leaves, rows, groups, width // groups)
    return separate.transpose(1, 2, 0, 3).reshape(rows, leaves * width)


def multiply_by_leaves(a: Array, b: Array, leaves: int, groups: int = 1) -> Array:
    """Compute a @ b, each leaf of the columns of b by itself: (n, k) @ (k, c) -> (n, c).

    Each column's sum is over the same rows, whoever has the column.
    """
    same = xp.broadcast_to(a, (leaves, *a.shape))
    return join(product(same, cut(b, leaves, groups)), groups)


def multiply_as_tree(a: Array, b: Array, leaves: int, groups: int = 1) -> Array:
    """Compute a @ b.T as the tree of the products of their leaves: (n, c), (k, c) -> (n, k)."""
    return tree_sum(product(cut(a, leaves, groups), cut(b, leaves, groups).swapaxes(1, 2)))


class _ColumnLeaves(Function):
    """The node of `column_linear`."""

    def forward(
        self, x: Array, weight: Array, bias: Array | None, transposed: bool, leaves: int, groups: int
    ) -> Array:
        self.transposed = transposed
        self.leaves = leaves
        self.groups = groups
        rows = as_rows(x)  # (N, in)
        self.save_for_backward(x=rows, weight=getter(self.inputs[1], weight))
        matrix = weight.T if transposed else weight  # (in, out)
        y = multiply_by_leaves(rows, matrix, leaves, groups)  # (N, out)
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, grad: Array, x: Array, weight: Callable[[], Array]) -> Gradients:
        g = as_rows(grad)  # (N, out)

        def compute_dweight(out: Array | None) -> Array:
            dweight = multiply_by_leaves(x.T, g, self.leaves, self.groups)  # (in, out)
            return copy_rows(dweight.T if self.transposed else dweight, out)

        def compute_dbias(out: Array | None) -> Array:
            return g.sum(axis=0, out=out)  # (out,)

        dx = None
        if self.needs[0]:
            matrix = weight().T if self.transposed else weight()  # (in, out)
            dx = multiply_as_tree(g, matrix, self.leaves, self.groups)  # (N, in)
            dx = dx.reshape(*grad.shape[:-1], x.shape[-1])
        dweight = LazyGradient(compute_dweight) if self.needs[1] else None
        dbias = LazyGradient(compute_dbias) if self.needs[2] else None
        return dx, dweight, dbias, None, None, None


class _RowLeaves(Function):
    """The node of `row_linear`."""

    def forward(self, x: Array, weight: Array, transposed: bool, leaves: int) -> Array:
        self.transposed = transposed
        self.leaves = leaves
        rows = as_rows(x)  # (N, in)
        self.save_for_backward(x=rows, weight=getter(self.inputs[1], weight))
        y = multiply_as_tree(rows, weight if transposed else weight.T, leaves)  # (N, out)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, grad: Array, x: Array, weight: Callable[[], Array]) -> Gradients:
        g = as_rows(grad)  # (N, out)

        def compute_dweight(out: Array | None) -> Array:
            dweight = multiply_by_leaves(g.T, x, self.leaves)  # (out, in)
            return copy_rows(dweight if self.transposed else dweight.T, out)

        dx = None
        if self.needs[0]:
            matrix = weight() if self.transposed else weight().T  # (out, in)
            dx = multiply_by_leaves(g, matrix, self.leaves)  # (N, in)
            dx = dx.reshape(*grad.shape[:-1], x.shape[-1])
        dweight = LazyGradient(compute_dweight) if self.needs[1] else None
        return dx, dweight, None, None


def copy_rows(array: Array, out: Array | None) -> Array:
    """Copy the array into `out`, or into new memory, row after row."""
    if out is None:
        return xp.ascontiguousarray(array)
    out[...] = array
    return out


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, leaves: int, groups: int = 1
) -> Tensor:
    """Compute `linear` of a layer whose columns are cut; the gradient of x is a tree over them."""
    return _ColumnLeaves.apply(x, weight, bias, transposed, leaves, groups)


def row_linear(x: Tensor, weight: Tensor, transposed: bool, leaves: int) -> Tensor:
    """Compute `linear` of a layer whose rows are cut; the result is a tree over them."""
    return _RowLeaves.apply(x, weight, transposed, leaves)


def column_sums(rows: Array, leaves: int) -> Array:
    """Add up the columns of each row as a tree of leaves: (N, c) -> (N,)."""
    return tree_sum(cut(rows, leaves).sum(axis=-1))


# ---- tokens in leaves ----------------------------------------------------------------------------


def token_sums(x: Array, leaves: int) -> Array:
    """Add up all tokens as a tree over leaves of each sequence: (B, T, h) -> (h,)."""
    batch, length, width = x.shape
    blocks = x.reshape(batch, leaves, length // leaves, width).swapaxes(0, 1)
    return tree_sum(blocks.reshape(leaves, -1, width).sum(axis=1))


class _LeafNorm(_LayerNorm):
    """The node of `norm`."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.leaves = leaves

    def backward(self, grad: Array, xhat: Array, rstd: Array, weight: Callable[[], Array]) -> Gradients:
        dx, _, _, _ = super().backward(grad, xhat, rstd, weight)
        dweight = token_sums(grad * xhat, self.leaves)
        dbias = token_sums(grad, self.leaves) if self.centers else None
        return dx, dweight, dbias, None


def norm(layer: LayerNorm | RMSNorm, leaves: int, x: Tensor) -> Tensor:
    """Compute a norm's forward: (B, T, h) -> (B, T, h); its gradients are trees over the tokens."""
    bias = layer.bias if isinstance(layer, LayerNorm) else None
    return record(_LeafNorm(leaves), (x, layer.weight, bias, layer.eps))


@operation
def plus_bias(y: Array, bias: Array, leaves: int) -> Result:
    """Add a bias (h,) to (B, T, h); its gradient is a tree over the tokens."""

    def dy(g: Array) -> Array:
        return g

    def dbias(g: Array) -> Array:
        return token_sums(g, leaves)

    return y + bias, dy, dbias


@operation
def own_rows(weight: Array, index: Array, is_own: Array) -> Result:
    """Look up rows by an index, as `embedding` does; where `is_own` is False the result is zeros.

    The gradient adds up the own rows alone: zeros among them would regroup the sum.
    """
    shape = weight.shape

    def dweight(g: Array, index: Array, is_own: Array) -> LazyGradient:
        own = is_own.reshape(-1)
        rows = as_rows(g)[own]

        def compute(out: Array | None) -> Array:
            if out is None:
                out = xp.empty(shape, dtype=rows.dtype)
            if len(rows) == 0:
                out[...] = 0
                return out
            return add_rows(rows, index.reshape(-1)[own], out)

        return LazyGradient(compute)

    y = xp.where(is_own[..., None], weight[index], xp.zeros((), dtype=weight.dtype))
    return y, Gradient(dweight, index=index, is_own=is_own)


# ---- terms that come one after another -----------------------------------------------------------


class TreeSum:
    """The sum of terms that are given one after another, in any order, as a tree over their numbers.

    It holds the sums of complete subtrees: of n terms in order, at most lg n of them.
    """

    def __init__(self) -> None:
        self.subtrees: dict[tuple[int, int], Any] = {}  # by (leaves, number among those of this size)

    def add(self, number: int, term: Any) -> None:
        """Add term `number`, and each subtree that it completes."""
        leaves = 1
        # number ^ 1 is the other one of its pair: 0 and 1, 2 and 3, ...
        while (leaves, number ^ 1) in self.subtrees:
            term = self.subtrees.pop((leaves, number ^ 1)) + term
            leaves *= 2
            number //= 2
        self.subtrees[leaves, number] = term

    def total(self) -> Any:
        """Return the sum of all terms, whose number is a power of two, and forget it."""
        ((_, total),) = self.subtrees.items()
        self.subtrees = {}
        return total


def is_power_of_two(count: int) -> bool:
    """Return whether `count` is 1, 2, 4, 8, ..."""
    return count.bit_count() == 1 and count > 0
