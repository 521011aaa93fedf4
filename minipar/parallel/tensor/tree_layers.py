"""The layers of layers.py with sums as trees (tree.py): on t ranks each has K/t of their leaves.

They have the bits of one rank that has all leaves. Each column layer crosses the border by itself,
also where layers.py lets a block cross for several of them: their gradients of one input then add
up after the sums over the ranks, as on one device. A Llama's layer therefore sums seven times where
plain tensor parallelism sums four times.
"""

from functools import partial

import minipar.parallel.tree_collectives  # noqa: F401 adds the algorithm "tree"
from minipar.autograd import Tensor
from minipar.backend import Array, xp
from minipar.nn.gpt import LanguageModel
from minipar.nn.layers import LayerNorm, Linear, RMSNorm, as_tensor
from minipar.parallel import tree
from minipar.parallel.tensor.layers import Border, ColumnLinear, RowLinear, VocabEmbedding


class TreeColumnLinear(ColumnLinear):
    """A rank's leaves of the columns; the gradient of x is a tree over those of all ranks.

    Each of `groups` stretches of columns is cut by itself, such as q, k and v.
    """

    def __init__(self, layer: Linear, border: Border, groups: int) -> None:
        super().__init__(layer, border)
        self.groups = groups

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        return tree.column_linear(
            self.border.enter(x),  # (B, T, in)
            self.weight,
            self.bias,
            self.transposed,
            self.border.group.leaves,
            self.groups,
        )


class TreeRowLinear(RowLinear):
    """A rank's leaves of the rows; the result is a tree over those of all ranks."""

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        y = tree.row_linear(x, self.weight, self.transposed, self.border.group.leaves)
        y = self.border.leave(y)
        if self.bias is None:
            return y
        leaves = token_leaves(self.border)
        return tree.plus_bias(y, self.bias, leaves)


class TreeVocabEmbedding(VocabEmbedding):
    """A rank's rows of an embedding.

    One rank has the row of a token, so the sum over the ranks rounds nothing.
    """

    def look_up(self, local: Array, is_own: Array) -> Tensor:
        index = xp.where(is_own, local, 0)
        return tree.own_rows(self.weight, index, is_own)


def token_leaves(border: Border) -> int:
    """Return how many leaves of the tokens a rank has outside of the border: all K, or its K/t."""
    leaves = border.group.leaves
    if border.sequence:
        return leaves
    return leaves * border.group.size


def head(x: Tensor, weight: Tensor, border: Border) -> Tensor:
    """Compute the logits of this rank's part of the vocabulary: (B, T, h), (V/t, h) -> (B, T, V/t)."""
    return tree.column_linear(border.enter(x), weight, None, True, border.group.leaves)


def use_trees(model: LanguageModel, border: Border) -> None:
    """Let the head and the norms add as trees."""
    model.project = partial(head, border=border)
    leaves = token_leaves(border)
    for _, module in model.named_modules():
        if isinstance(module, LayerNorm | RMSNorm):
            forward = partial(tree.norm, module, leaves)
            module.forward = forward  # type: ignore[method-assign]
