"""Layers that each hold a part of the serial model's: they take its Parameters, cut already (plan.py).

With `sequence` the activations between two of these layers are split along the sequence (dim 1), so a column layer
begins with an all-gather where it would copy, and a row layer ends with a reduce-scatter where it would all-reduce. An
all-reduce is those two, so the bytes are the same; LayerNorm, dropout and residuals work on 1/t of the tokens.
"""

from __future__ import annotations

from typing import Any

from minipar.autograd import IGNORE_INDEX, Function, LazyGradient, Tensor, count_flops, embedding, linear
from minipar.autograd.fused import outer_product
from minipar.backend import Array, xp
from minipar.nn import Embedding, Module, Parameter
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


class ColumnParallelLinear(Module):
    """Y = X [A_1 | ... | A_t] + b, the columns split: x whole -> Y_r = X A_r + b_r, this rank's columns.

    weight (in, out/t), bias (out/t,). On the wire: what `enter` sends.
    """

    def __init__(self, weight: Parameter, bias: Parameter, group: TensorGroup, sequence: bool) -> None:
        self.weight, self.bias = weight, bias
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.group, self.sequence)  # (B, T, out/t)


class RowParallelLinear(Module):
    """Y = sum_r X_r A_r + b, the rows split: x this rank's columns (B, T, in/t) -> Y, summed, the bias added once.

    weight (in/t, out), bias (out,), on every rank. On the wire: what `leave` sends.
    """

    def __init__(self, weight: Parameter, bias: Parameter, group: TensorGroup, sequence: bool) -> None:
        self.weight, self.bias = weight, bias
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        # The bias after the sum: added on every rank before it, it would count t times.
        return leave(linear(x, self.weight), self.group, self.sequence) + self.bias


class VocabParallelEmbedding(Module):
    """Rows of weight (V/t, h) for the tokens that this rank holds, zeros for the others; summed: (B, T) -> (B, T, h).

    On the wire: what `leave` sends.
    """

    def __init__(self, weight: Parameter, group: TensorGroup, sequence: bool) -> None:
        self.weight = weight
        self.group, self.sequence = group, sequence

    def forward(self, tokens: Array) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        here = (local >= 0) & (local < rows)
        found = embedding(self.weight, xp.where(here, local, 0))
        return leave(found * here[..., None].astype(self.weight.dtype), self.group, self.sequence)


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


def vocab_parallel_cross_entropy_sum(logits: Tensor, targets: Array, group: TensorGroup) -> Tensor:
    """`autograd.cross_entropy_sum` of logits (B, T, V/t) whose last dim is split over the group; the same on each rank.

    With m = max and z = log sum exp over the whole vocabulary the loss is z - logit[target]. On the wire, forward only:
    an all-reduce of N maxima and one of 2N sums (exponentials, target logits), where gathering would take N V. N = B T.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, group)
