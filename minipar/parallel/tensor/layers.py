"""Layers of which each rank holds a part, and the border between such layers and the other ones.

LayerNorm, dropout and residual additions are outside the border. There each rank has the whole
activation or, with sequence parallelism, its own 1/t of the tokens. In the second case a rank's
gradients of LayerNorms and row layers' biases cover its own tokens, so TensorParallel in plan.py
sums them over the ranks. Inside the border each rank has its own columns of an activation. A column
layer starts with the border's `enter`, and a row layer ends with the border's `leave`.

A parallel layer is made from a serial one, and takes over its Parameters. `shard_parameter` has replaced
their values by this rank's part before. plan.py makes the parallel layers of minipar's models, and
user_layers.py those of a user's own model.
"""

from minipar.autograd.fused import embedding, linear
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, from_host, xp
from minipar.nn.layers import Embedding, Linear, as_tensor
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.parallel.placement import Placement, Shard, update
from minipar.parallel.split_guards import check_same_batch
from minipar.parallel.tensor import mappings
from minipar.parallel.tensor.mappings import TensorGroup

SEQUENCE = 1  # the dim of the tokens in (B, T, h)


class Border:
    """The border between what the ranks share and what each computes with its part of a layer.

    Entering with an activation (B, T, h) sends nothing, and its backward all-reduces the gradient.
    Leaving all-reduces the activation, and its backward sends nothing. With `sequence`, entering
    all-gathers the activation, and its backward reduce-scatters the gradient. Leaving then
    reduce-scatters the activation, and its backward all-gathers the gradient. Both ways send the
    same bytes.
    """

    def __init__(self, group: TensorGroup, sequence: bool = False) -> None:
        self.group = group
        self.sequence = sequence

    def enter(self, x: Tensor) -> Tensor:
        """Take an activation in: (B, T, h) or (B, T/t, h) -> (B, T, h)."""
        if self.sequence:
            return mappings.all_gather(x, self.group, SEQUENCE)
        return mappings.copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the ranks' terms and take the sum out: (B, T, h) -> (B, T, h) or (B, T/t, h)."""
        if self.sequence:
            return mappings.reduce_scatter(x, self.group, SEQUENCE)
        return mappings.reduce_from(x, self.group)


def shard_parameter(parameter: Parameter, shard: Shard) -> None:
    """Replace a parameter by this rank's part of it, and record the placement."""
    if parameter.placement is None:
        parameter.placement = Placement("", parameter.shape)
    update(parameter, tp=shard)
    parameter.data = shard.part(parameter.data)


class ColumnLinear(Module):
    """A rank's columns of a linear layer.

    Of Y = X [A_1 | ... | A_t] + b, rank r computes Y_r = X A_r + b_r. weight is (in, out/t), or its
    transpose if `transposed`, and bias is (out/t,). x is as outside the border, (B, T, in) or
    (B, T/t, in), and the result is this rank's columns (B, T, out/t). Sends what `enter` sends.
    """

    def __init__(self, layer: Linear, border: Border) -> None:
        self.weight = layer.weight
        self.bias = layer.bias
        self.transposed = layer.transposed
        self.border = border

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        x = self.border.enter(x)  # (B, T, in)
        return linear(x, self.weight, self.bias, self.transposed)  # (B, T, out/t)


class RowLinear(Module):
    """A rank's rows of a linear layer.

    Y = X_1 A_1 + ... + X_t A_t + b, where rank r computes X_r A_r. x is this rank's columns
    (B, T, in/t). weight is (in/t, out), or its transpose if `transposed`, and bias (out,) is whole
    on every rank. The result is as outside the border, (B, T, out) or (B, T/t, out). Sends what
    `leave` sends.
    """

    def __init__(self, layer: Linear, border: Border) -> None:
        self.weight = layer.weight
        self.bias = layer.bias
        self.transposed = layer.transposed
        self.border = border

    def forward(self, x: Tensor | Array) -> Tensor:
        x = as_tensor(x, self.weight.dtype)
        y = self.border.leave(linear(x, self.weight, None, self.transposed))
        # The bias is added after the sum. If every rank added it before, it would count t times.
        return y if self.bias is None else y + self.bias


class VocabEmbedding(Module):
    """A rank's rows of an embedding: (B, T) -> (B, T, h) or (B, T/t, h).

    Each rank looks up the tokens whose rows are in its weight (V/t, h), and has zeros for all other
    tokens. The ranks' results are summed. Rows of zeros pad the weight to a multiple of t rows.
    Sends what `leave` sends. UsageError for a token that is not below V. UsageError on every rank,
    in the first call, if their tokens differ. It sends a checksum, uncounted.
    """

    def __init__(self, layer: Embedding, border: Border) -> None:
        self.weight = layer.weight
        self.checked = layer.checked
        self.border = border
        self.is_compared = False

    def forward(self, tokens: Array) -> Tensor:
        if not self.is_compared:
            self.is_compared = True
            check_same_batch(self.border.group.comm, x=tokens)
        rows = self.weight.shape[0]
        local = self.checked(tokens) - self.border.group.rank * rows
        is_own = (local >= 0) & (local < rows)
        return self.border.leave(self.look_up(local, is_own))

    def look_up(self, local: Array, is_own: Array) -> Tensor:
        """Look up the rows of this rank's tokens, and zeros for the others: (B, T) -> (B, T, h)."""
        # Row 0 stands in for the rows of other ranks, and is multiplied by zero.
        y = embedding(self.weight, xp.where(is_own, local, 0))
        return y * is_own[..., None].astype(self.weight.dtype)


class PositionEmbedding(Module):
    """An embedding whose weight is whole on every rank: (T,) -> (T, h) or (T/t, h).

    With sequence parallelism a rank looks up the positions of its own tokens.
    """

    def __init__(self, layer: Embedding, border: Border) -> None:
        self.weight = layer.weight
        self.border = border

    def forward(self, index: Array) -> Tensor:
        index = from_host(index)
        if self.border.sequence:
            index = self.border.group.part(index, dim=0)
        return embedding(self.weight, index)
