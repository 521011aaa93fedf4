"""Tensor parallelism with sums as trees (tree_sums.py): on t ranks each has K/t of their leaves.

The layers have the bits of one rank that has all leaves. Each column layer crosses the border by
itself, also where a model's plan lets a block cross for several of them: their gradients of one
input then add up after the sums over the ranks, as on one device. A Llama's layer therefore sums
seven times where plain tensor parallelism sums four times.

Seams of the core: a plan; the model's functions `project` and `criterion`; `ALGORITHMS`.
"""

from dataclasses import replace
from functools import partial

import minipar.more.tree.tree_collectives  # noqa: F401 adds the algorithm "tree"
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides
from minipar.more.llama import RMSNorm, identity, inside_columns
from minipar.more.tree import tree_sums as tree
from minipar.nn.gpt import LanguageModel
from minipar.nn.layers import LayerNorm, Linear, as_tensor
from minipar.parallel.tensor.layers import Border, ColumnLinear, RowLinear, VocabEmbedding
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import Plan, TensorParallel, plan_of, tensor_parallel
from minipar.parallel.tensor.vocabulary import vocab_parallel_cross_entropy_sum


class TreeGroup(TensorGroup):
    """The ranks of tensor parallelism, whose sums are trees; each rank has `leaves` of the leaves."""

    def __init__(self, comm: Communicator, leaves: int) -> None:
        super().__init__(comm, "tree")
        self.leaves = leaves

    def row_sums(self, x: Array) -> Array:
        """Add up this rank's columns of each row, leaf by leaf: (N, V/t) -> (N,)."""
        return tree.column_sums(x, self.leaves)


class TreeColumnLinear(ColumnLinear):
    """A rank's leaves of the columns; the gradient of x is a tree over those of all ranks.

    Each of `groups` stretches of columns is cut by itself, such as q, k and v.
    """

    def __init__(self, layer: Linear, border: Border, leaves: int, groups: int) -> None:
        super().__init__(layer, border)
        self.leaves = leaves
        self.groups = groups

    def forward(self, x: Tensor | Array) -> Tensor:
        x = self.border.enter(as_tensor(x, self.weight.dtype))  # (B, T, in)
        return tree.column_linear(x, self.weight, self.bias, self.transposed, self.leaves, self.groups)


class TreeRowLinear(RowLinear):
    """A rank's leaves of the rows; the result is a tree over those of all ranks."""

    def __init__(self, layer: Linear, border: Border, leaves: int) -> None:
        super().__init__(layer, border)
        self.leaves = leaves

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        y = self.border.leave(tree.row_linear(x, self.weight, self.transposed, self.leaves))
        if self.bias is None:
            return y
        return tree.plus_bias(y, self.bias, token_leaves(self.border, self.leaves))


class TreeVocabEmbedding(VocabEmbedding):
    """A rank's rows of an embedding.

    One rank has the row of a token, so the sum over the ranks rounds nothing.
    """

    def look_up(self, local: Array, is_own: Array) -> Tensor:
        index = xp.where(is_own, local, 0)
        return tree.own_rows(self.weight, index, is_own)


def token_leaves(border: Border, leaves: int) -> int:
    """Return how many leaves of the tokens a rank has outside of the border: all K, or its K/t."""
    if border.sequence:
        return leaves
    return leaves * border.group.size


def tree_plan(plan: Plan, leaves: int) -> Plan:
    """Return the plan with layers of trees, each of which crosses the border by itself."""
    found = {}
    for name, split in plan.items():
        layer = split.layer
        if layer in (ColumnLinear, inside_columns):
            layer = partial(TreeColumnLinear, leaves=leaves, groups=split.groups)
        elif layer is RowLinear:
            layer = partial(TreeRowLinear, leaves=leaves)
        elif layer is VocabEmbedding:
            layer = TreeVocabEmbedding
        found[name] = replace(split, layer=layer)
    return found


def head(x: Tensor, weight: Tensor, border: Border, leaves: int) -> Tensor:
    """Compute the logits of this rank's part of the vocabulary: (B, T, h), (V/t, h) -> (B, T, V/t)."""
    return tree.column_linear(border.enter(x), weight, None, True, leaves)


def tree_parallel(
    model: LanguageModel, comm: Communicator, count: int, sequence: bool = False
) -> TensorParallel:
    """Split `model` over `comm` as `tensor_parallel`, with sums as trees of `count` leaves, `leaf_count` for example.

    All numbers of ranks give the same bits, one rank too. UsageError unless `count` is a power of
    two that the ranks divide.
    """
    if not tree.is_power_of_two(count):
        raise UsageError(f"{count} leaves are no power of two: a balanced tree needs one")
    check_divides("leaves/tp", count, comm.size, "each rank has as many leaves")
    leaves = count // comm.size
    plan = tree_plan(plan_of(model), leaves)
    tensor = tensor_parallel(model, comm, "tree", sequence, plan=plan)
    group = TreeGroup(comm, leaves)
    border = Border(group, sequence)
    size = model.config.vocab_size
    model.project = partial(head, border=border, leaves=leaves)
    model.criterion = partial(vocab_parallel_cross_entropy_sum, group=group, vocab_size=size)
    for _, module in model.named_modules():
        if hasattr(module, "enter"):
            module.enter = identity  # each of its layers enters by itself
        if isinstance(module, LayerNorm | RMSNorm):
            forward = partial(tree.norm, module, token_leaves(border, leaves))
            module.forward = forward  # type: ignore[method-assign]
    return tensor
