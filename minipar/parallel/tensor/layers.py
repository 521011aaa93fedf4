"""Layers of which each rank holds a part: modules that hold this rank's part of the serial model's Parameters.

With `sequence`, activations between these layers are split along the sequence (dim 1): LayerNorm, dropout and residuals
work on 1/t of the tokens. The gradients of LayerNorms and row biases must then be summed over the ranks, so only
`tensor_parallel`, which knows the whole model, sets `sequence`.
"""

from typing import Any, Self

from minipar.autograd import IGNORE_INDEX, LazyGradient, Tensor, embedding, linear
from minipar.autograd.fused import CrossEntropyFunction, LinearFunction
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import check_divides
from minipar.nn.layers import Embedding, Linear, RMSNorm
from minipar.nn.module import Module, Parameter
from minipar.parallel.placement import Placement, Shard, update
from minipar.parallel.tensor.mappings import TensorGroup, all_gather, copy_to, reduce_from, reduce_scatter

SEQUENCE = 1  # the dim of the tokens in (B, T, h)
EQUAL = "each tensor-parallel rank has as many"


def enter(x: Tensor, group: TensorGroup, sequence: bool) -> Tensor:
    """Take an activation into the part of a layer where ranks differ: (B, T, h) or (B, T/t, h) -> (B, T, h).

    Backward all-reduces B T h elements. With `sequence`, forward all-gathers and backward reduce-scatters them.
    """
    return all_gather(x, group, SEQUENCE) if sequence else copy_to(x, group)


def leave(x: Tensor, group: TensorGroup, sequence: bool) -> Tensor:
    """Sum the ranks' partial results at the end of that part: (B, T, h) -> (B, T, h) or (B, T/t, h).

    Forward all-reduces B T h elements. With `sequence`, forward reduce-scatters and backward all-gathers them.
    """
    return reduce_scatter(x, group, SEQUENCE) if sequence else reduce_from(x, group)


class _ColumnLinear(LinearFunction):
    """linear(enter(x), weight, bias) with a backward that sends while it computes; a row layer's user needs the sum."""

    def forward(  # type: ignore[override]
        self, x: Array, weight: Array, bias: Array | None, group: TensorGroup, sequence: bool, transposed: bool
    ) -> Array:
        self.group, self.sequence = group, sequence
        whole = group.gather(x, SEQUENCE) if sequence else x  # (B, T, h)
        return super().forward(whole, weight, bias, transposed)  # (B, T, out/t)

    def backward(self, grad: Array) -> Any:
        partial, dweight, dbias, _ = super().backward(grad)  # dweight and dbias are not computed yet
        if partial is None:
            return None, dweight, dbias, None, None, None
        # The sum over the ranks is under way while the weight's gradient is computed, which needs nothing from others.
        # NB: Megatron calls this async_tensor_model_parallel_allreduce.
        start = self.group.start_sum_part(partial, SEQUENCE) if self.sequence else self.group.start_sum(partial)
        return LazyGradient(lambda out: start()), dweight, dbias, None, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup, sequence: bool, transposed: bool = False
) -> Tensor:
    """Compute `linear(enter(x), weight, bias)` for this rank's columns. Sends what `enter` sends."""
    return _ColumnLinear.apply(x, weight, bias, group, sequence, transposed)


def split(parameter: Parameter, shard: Shard) -> None:
    """Replace a parameter by this rank's part of it, and record the placement."""
    if parameter.placement is None:
        parameter.placement = Placement("", parameter.shape)
    update(parameter, tp=shard)
    parameter.map_value(shard.local_shape(parameter.shape), shard.part)


class _ParallelLayer(Module):
    group: TensorGroup
    sequence = False

    @classmethod
    def from_serial(cls, layer: Module, group: TensorGroup, sequence: bool) -> Self:
        """Make a layer of a serial layer's parameters, which hold this rank's part already."""
        parallel = cls.__new__(cls)
        vars(parallel).update(vars(layer), group=group, sequence=sequence)
        return parallel


class ColumnParallelLinear(_ParallelLayer, Linear):
    """A linear layer split by columns: of Y = X [A_1 | ... | A_t] + b, rank r computes Y_r = X A_r + b_r.

    x is whole, weight (in, out/t), bias (out/t,), and the result is this rank's columns. `groups` equal stretches of
    columns are split one by one, as q, k and v. UsageError if t does not divide a stretch. Sends what `enter` sends.
    """

    def __init__(
        self, n_in: int, n_out: int, comm: Communicator, *, name: str, groups: int = 1, **options: Any
    ) -> None:
        self.group = TensorGroup(comm)
        check_divides(f"{name}: n_out/(groups*tp)", n_out, groups * self.group.size, EQUAL)
        super().__init__(n_in, n_out, name=name, deferred=True, **options)
        split(self.weight, self.group.shard(0 if self.transposed else 1, n_out, groups))
        if self.bias is not None:
            split(self.bias, self.group.shard(0, n_out, groups))
        self.materialize()

    def forward(self, x: Tensor | Array) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.group, self.sequence, self.transposed)  # (B, T, out/t)


class RowParallelLinear(_ParallelLayer, Linear):
    """A linear layer split by rows: Y = X_1 A_1 + ... + X_t A_t + b, where rank r computes X_r A_r.

    x is this rank's columns (B, T, in/t), weight (in/t, out), and bias (out,) is whole on every rank. The result is the
    sum over the ranks. UsageError if t does not divide n_in. Sends what `leave` sends.
    """

    def __init__(self, n_in: int, n_out: int, comm: Communicator, *, name: str, **options: Any) -> None:
        self.group = TensorGroup(comm)
        check_divides(f"{name}: n_in/tp", n_in, self.group.size, EQUAL)
        super().__init__(n_in, n_out, name=name, deferred=True, **options)
        split(self.weight, self.group.shard(1 if self.transposed else 0, n_in))
        self.materialize()

    def forward(self, x: Tensor | Array) -> Tensor:
        y = leave(linear(x, self.weight, None, self.transposed), self.group, self.sequence)
        # The bias is added after the sum; before it, on every rank, it would count t times.
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_ParallelLayer, Embedding):
    """An embedding split by rows: each rank looks up the tokens in its weight (V/t, h), and the results are summed.

    (B, T) -> (B, T, h). Tokens of other ranks give zeros. Zeros pad V to a multiple of t. Sends what `leave` sends.
    """

    def __init__(self, count: int, dim: int, comm: Communicator, *, name: str, **options: Any) -> None:
        self.group = TensorGroup(comm)
        super().__init__(count, dim, name=name, deferred=True, **options)
        split(self.weight, self.group.shard(0, count))
        self.materialize()

    def forward(self, tokens: Array) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        is_own = (local >= 0) & (local < rows)
        y = embedding(self.weight, xp.where(is_own, local, 0))
        return leave(y * is_own[..., None].astype(self.weight.dtype), self.group, self.sequence)


class SequenceEmbedding(_ParallelLayer, Embedding):
    """An embedding whose weight is whole; with `sequence`, looked up for this rank's slice: (T,) -> (T/t, h)."""

    def forward(self, index: Array) -> Tensor:
        return embedding(self.weight, self.group.part(index, 0) if self.sequence else index)


class EnteringNorm(_ParallelLayer, RMSNorm):
    """An RMSNorm whose result enters several serial layers of this rank's columns. Sends what `enter` sends."""

    def forward(self, x: Tensor | Array) -> Tensor:
        return enter(super().forward(x), self.group, self.sequence)


def vocab_parallel_head(x: Tensor, weight: Tensor, vocab_size: int, group: TensorGroup, sequence: bool) -> Tensor:
    """Compute the logits of a split vocabulary, which are not gathered: x, weight (V/t, h) -> (B, T, V/t).

    Rows that pad the vocabulary to a multiple of t get -inf, whose softmax is 0. Sends what `enter` sends.
    """
    logits = column_linear(x, weight, None, group, sequence, transposed=True)
    real = vocab_size - group.rank * weight.shape[0]  # the rows from here on are padding
    if real >= weight.shape[0]:
        return logits
    mask = xp.zeros(weight.shape[0], dtype=logits.dtype)
    mask[max(0, real) :] = -xp.inf
    return logits + mask


class _VocabParallelCrossEntropy(CrossEntropyFunction):
    """The cross entropy of logits whose vocabulary is split; backward is that of the serial operation."""

    def forward(self, logits: Array, targets: Array, group: TensorGroup) -> Array:  # type: ignore[override]
        self.shape = logits.shape
        logits = logits.reshape(-1, logits.shape[-1])  # (N, V/t)
        targets = targets.reshape(-1)
        self.counted = targets != IGNORE_INDEX
        local = targets - group.rank * logits.shape[-1]
        self.one_hot = self.counted & (local >= 0) & (local < logits.shape[-1])  # False if another rank has the target
        self.targets = xp.where(self.one_hot, local, 0)
        self.rows = xp.arange(targets.size)
        top = group.comm.all_reduce(logits.max(axis=-1), op="max", algorithm=group.reduction)  # (N,)
        p = logits - top[:, None]
        sums = xp.empty((2, targets.size), dtype=p.dtype)  # exponentials; the target's logit, from the rank that has it
        sums[1] = xp.where(self.one_hot, p[self.rows, self.targets], 0)
        xp.exp(p, out=p)
        sums[0] = p.sum(axis=-1)
        group.comm.all_reduce(sums, algorithm=group.reduction)
        p /= sums[0][:, None]
        self.probabilities = p
        return xp.where(self.counted, xp.log(sums[0]) - sums[1], 0).sum()

    def backward(self, grad: Array) -> Any:
        return *super().backward(grad), None


def vocab_parallel_cross_entropy_sum(logits: Tensor, targets: Array, group: Communicator | TensorGroup) -> Tensor:
    """Compute `autograd.cross_entropy_sum` of logits (B, T, V/t) whose last dim is split over the group.

    Every rank gets the same loss: log sum exp(logits) - logits[target] over the whole vocabulary. With N = B T, forward
    all-reduces N maxima and 2N sums (exponentials, target logits); gathering would send N V. Backward sends nothing.
    """
    group = group if isinstance(group, TensorGroup) else TensorGroup(group)
    return _VocabParallelCrossEntropy.apply(logits, targets, group)
