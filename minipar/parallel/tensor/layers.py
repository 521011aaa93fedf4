"""Layers that each hold a part of the serial model's: they take its Parameters, cut already (plan.py).

With `sequence` the activations between two of these layers are split along the sequence (dim 1), so a column layer
begins with an all-gather where it would copy, and a row layer ends with a reduce-scatter where it would all-reduce. An
all-reduce is those two, so the bytes are the same; LayerNorm, dropout and residuals work on 1/t of the tokens.
"""

from __future__ import annotations

from typing import Any, Self

from minipar.autograd import IGNORE_INDEX, Function, LazyGradient, Tensor, count_flops, embedding, linear
from minipar.autograd.fused import outer_product
from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError
from minipar.nn.layers import Embedding, Linear
from minipar.nn.module import Parameter
from minipar.parallel.placement import Placement, Shard, update
from minipar.parallel.tensor.mappings import TensorGroup, all_gather, copy_to, reduce_from, reduce_scatter

SEQUENCE = 1  # the dim of the tokens in (B, T, h)


def enter(x: Tensor, group: TensorGroup, sequence: bool) -> Tensor:
    """Into the part of a layer where ranks differ: (B, T, h) or (B, T/t, h) -> (B, T, h).

    Backward: an all-reduce of B T h elements; with `sequence`, an all-gather forward and a reduce-scatter backward.
    """
    return all_gather(x, group, SEQUENCE) if sequence else copy_to(x, group)


def leave(x: Tensor, group: TensorGroup, sequence: bool) -> Tensor:
    """Out of it again, partial results summed: (B, T, h) -> (B, T, h) or (B, T/t, h).

    Forward: an all-reduce of B T h elements; with `sequence`, a reduce-scatter forward and an all-gather backward.
    """
    return reduce_scatter(x, group, SEQUENCE) if sequence else reduce_from(x, group)


class _ColumnLinear(Function):
    """linear(enter(x), weight, bias) as one node, so that backward sends while it computes."""

    def forward(
        self, x: Array, weight: Array, bias: Array | None, group: TensorGroup, sequence: bool, transposed: bool
    ) -> Array:
        self.group, self.sequence, self.transposed = group, sequence, transposed
        whole = group.gather(x, SEQUENCE) if sequence else x
        self.shape = whole.shape
        self.x = whole.reshape(-1, whole.shape[-1])  # (N, in)
        self.matrix = self.at_backward(1, weight)
        y = xp.matmul(self.x, weight.T if transposed else weight)  # (N, out/t)
        count_flops(*self.x.shape, y.shape[-1])
        if bias is not None:
            y += bias
        return y.reshape(*whole.shape[:-1], y.shape[-1])

    def backward(self, grad: Array) -> Any:
        x, g, w = self.x, grad.reshape(-1, grad.shape[-1]), self.matrix()
        dx = None
        if self.needs[0]:
            partial = xp.matmul(g, w if self.transposed else w.T).reshape(self.shape)
            count_flops(*x.shape, g.shape[-1])
            # Under way while the weight's gradient, which needs nothing from others, is computed.
            # NB: Megatron calls this async_tensor_model_parallel_allreduce.
            start = self.group.start_sum_part(partial, SEQUENCE) if self.sequence else self.group.start_sum(partial)
            dx = LazyGradient(lambda out: start())
        left, right = (g, x) if self.transposed else (x, g)
        dweight = LazyGradient(lambda out: outer_product(left, right, out))
        return dx, dweight, LazyGradient(lambda out: g.sum(axis=0, out=out)), None, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup, sequence: bool, transposed: bool = False
) -> Tensor:
    """`linear(enter(x), weight, bias)` for this rank's columns; backward computes the weight's gradient while the
    input's is being summed over the ranks. On the wire: what `enter` sends.

    There is no such thing to do in forward: what follows a row layer needs all of its sum. Cut into chunks the product
    could hide part of it, at twice the messages.
    """
    return _ColumnLinear.apply(x, weight, bias, group, sequence, transposed)


def split(parameter: Parameter, shard: Shard) -> None:
    """Leave this rank its part of a parameter, and record the placement."""
    if parameter.placement is None:
        parameter.placement = Placement("", parameter.shape)
    update(parameter, tp=shard)
    parameter.map_value(shard.local_shape(parameter.shape), shard.part)


def _check_divides(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise UsageError(f"{what} = {size}/{ranks} is not a whole number: each tensor-parallel rank has as many")


class ColumnParallelLinear(Linear):
    """Y = X [A_1 | ... | A_t] + b, the columns split: x whole -> Y_r = X A_r + b_r, this rank's columns.

    weight (in, out/t), bias (out/t,). `groups` stretches of the columns are each split, as q, k and v of one product
    are. UsageError if t does not divide a stretch. Sends what `enter` sends.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        comm: Communicator | TensorGroup,
        *,
        name: str,
        groups: int = 1,
        sequence_parallel: bool = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        self.group, self.sequence = TensorGroup.of(comm), sequence_parallel
        _check_divides(f"{name}: n_out/(groups*tp)", n_out, groups * self.group.size)
        serial = Linear(n_in, n_out, name=name, bias=bias, deferred=True, **options)
        self.weight, self.bias = serial.weight, serial.bias
        split(self.weight, self.group.shard(1, n_out, groups))
        if self.bias is not None:
            split(self.bias, self.group.shard(0, n_out, groups))
        self.materialize()

    @classmethod
    def from_parts(
        cls, weight: Parameter, bias: Parameter | None, group: TensorGroup, sequence: bool
    ) -> ColumnParallelLinear:
        """Make a layer of this rank's parts."""
        layer = cls.__new__(cls)
        layer.weight, layer.bias, layer.group, layer.sequence = weight, bias, group, sequence
        return layer

    def forward(self, x: Tensor | Array) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.group, self.sequence)  # (B, T, out/t)


class RowParallelLinear(Linear):
    """Y = sum_r X_r A_r + b, the rows split: x this rank's columns (B, T, in/t) -> Y, summed, the bias added once.

    weight (in/t, out), bias (out,), on every rank. UsageError if t does not divide n_in. Sends what `leave` sends.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        comm: Communicator | TensorGroup,
        *,
        name: str,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        self.group, self.sequence = TensorGroup.of(comm), sequence_parallel
        _check_divides(f"{name}: n_in/tp", n_in, self.group.size)
        serial = Linear(n_in, n_out, name=name, deferred=True, **options)
        self.weight, self.bias = serial.weight, serial.bias
        split(self.weight, self.group.shard(0, n_in))
        self.materialize()

    @classmethod
    def from_parts(
        cls, weight: Parameter, bias: Parameter | None, group: TensorGroup, sequence: bool
    ) -> RowParallelLinear:
        """Make a layer of this rank's parts."""
        layer = cls.__new__(cls)
        layer.weight, layer.bias, layer.group, layer.sequence = weight, bias, group, sequence
        return layer

    def forward(self, x: Tensor | Array) -> Tensor:
        y = leave(linear(x, self.weight), self.group, self.sequence)
        # The bias after the sum: added on every rank before it, it would count t times.
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(Embedding):
    """Rows of weight (V/t, h) for the tokens that this rank holds, zeros for the others; summed: (B, T) -> (B, T, h).

    A vocabulary that t does not divide is padded with zeros. Sends what `leave` sends.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        comm: Communicator | TensorGroup,
        *,
        name: str,
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        self.group, self.sequence = TensorGroup.of(comm), sequence_parallel
        self.weight = Embedding(count, dim, name=name, deferred=True, **options).weight
        split(self.weight, self.group.shard(0, count))
        self.materialize()

    @classmethod
    def from_parts(cls, weight: Parameter, group: TensorGroup, sequence: bool) -> Self:
        """Make a layer of this rank's rows."""
        layer = cls.__new__(cls)
        layer.weight, layer.group, layer.sequence = weight, group, sequence
        return layer

    def forward(self, tokens: Array) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        is_own = (local >= 0) & (local < rows)
        y = embedding(self.weight, xp.where(is_own, local, 0))
        return leave(y * is_own[..., None].astype(self.weight.dtype), self.group, self.sequence)


class SequenceEmbedding(Embedding):
    """Rows of the whole weight for this rank's slice of the index: (T,) -> (T/t, h)."""

    def __init__(self, weight: Parameter, group: TensorGroup) -> None:
        self.weight, self.group = weight, group

    def forward(self, index: Array) -> Tensor:
        return embedding(self.weight, self.group.part(index, 0))


class VocabParallelHead:
    """The tied head over a split vocabulary: x, (V/t, h) -> logits (B, T, V/t), never gathered.

    Rows that pad the vocabulary to a multiple of t get -inf, which no softmax sees. On the wire: what `enter` sends.
    """

    def __init__(self, vocab_size: int, group: TensorGroup, sequence: bool) -> None:
        self.vocab_size, self.group, self.sequence = vocab_size, group, sequence

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        logits = column_linear(x, weight, None, self.group, self.sequence, transposed=True)
        padding = weight.shape[0] * (self.group.rank + 1) - self.vocab_size
        if padding <= 0:
            return logits
        real = max(0, weight.shape[0] - padding)
        mask = xp.zeros(weight.shape[0], dtype=logits.dtype)
        mask[real:] = -xp.inf
        return logits + mask


class _VocabParallelCrossEntropy(Function):
    def forward(self, logits: Array, targets: Array, group: TensorGroup) -> Array:
        self.shape = logits.shape
        logits = logits.reshape(-1, logits.shape[-1])  # (N, V/t)
        targets = targets.reshape(-1)
        self.counted = targets != IGNORE_INDEX
        local = targets - group.rank * logits.shape[-1]
        self.here = self.counted & (local >= 0) & (local < logits.shape[-1])
        self.local = xp.where(self.here, local, 0)
        self.rows = xp.arange(targets.size)
        top = group.comm.all_reduce(logits.max(axis=-1), op="max", algorithm=group.reduction)  # (N,)
        p = logits - top[:, None]
        sums = xp.empty((2, targets.size), dtype=p.dtype)  # of exponentials; the target's logit, from who has it
        sums[1] = xp.where(self.here, p[self.rows, self.local], 0)
        xp.exp(p, out=p)
        sums[0] = p.sum(axis=-1)
        group.comm.all_reduce(sums, algorithm=group.reduction)
        p /= sums[0][:, None]
        self.probabilities = p
        return xp.where(self.counted, xp.log(sums[0]) - sums[1], 0).sum()

    def backward(self, grad: Array) -> Any:
        dlogits = self.probabilities  # overwritten: nobody else holds it and backward runs once
        dlogits[self.rows, self.local] -= self.here
        dlogits *= xp.where(self.counted, grad, 0)[:, None]
        return dlogits.reshape(self.shape), None, None


def vocab_parallel_cross_entropy_sum(logits: Tensor, targets: Array, group: Communicator | TensorGroup) -> Tensor:
    """`autograd.cross_entropy_sum` of logits (B, T, V/t) whose last dim is split over the group; the same on each rank.

    With m = max and z = log sum exp over the whole vocabulary the loss is z - logit[target]. On the wire, forward only:
    an all-reduce of N maxima and one of 2N sums (exponentials, target logits), where gathering would take N V. N = B T.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, TensorGroup.of(group))
