"""The head and the loss of a vocabulary that ranks share: the logits are never gathered."""

from typing import Any

from minipar.autograd.checks import IGNORE_INDEX, check_targets
from minipar.autograd.fused import CrossEntropyFunction, as_rows, linear
from minipar.autograd.rules import Gradients
from minipar.autograd.tensor import Tensor
from minipar.backend import Array, xp
from minipar.parallel.tensor.layers import Border
from minipar.parallel.tensor.mappings import TensorGroup


def vocab_parallel_head(x: Tensor, weight: Tensor, vocab_size: int, border: Border) -> Tensor:
    """Compute the logits of this rank's part of the vocabulary: (B, T, h), (V/t, h) -> (B, T, V/t).

    Rows of zeros pad the weight to a multiple of t rows. Their logits are set to -inf, so that
    their probabilities are 0. Sends what `enter` sends.
    """
    rows = weight.shape[0]
    logits = linear(border.enter(x), weight, transposed=True)
    first_padding = vocab_size - border.group.rank * rows  # this rank's rows from here on are padding
    if first_padding >= rows:
        return logits
    mask = xp.zeros(rows, dtype=logits.dtype)
    mask[max(0, first_padding) :] = -xp.inf
    return logits + mask


class _VocabParallelCrossEntropy(CrossEntropyFunction):
    """The cross entropy of a split vocabulary, with N = B T rows. It saves what the serial operation's backward reads.

    NB: Megatron-LM has the same name.
    """

    def forward(  # type: ignore[override]
        self, logits: Array, targets: Array, group: TensorGroup
    ) -> Array:
        columns = logits.shape[-1]  # V/t
        self.shape = logits.shape
        logits = as_rows(logits)  # (N, V/t)
        targets = targets.reshape(-1)
        local = targets - group.rank * columns
        counted = targets != IGNORE_INDEX
        # A row's one-hot vector is 1 at its target's column, if this rank has that column.
        one_hot = counted & (local >= 0) & (local < columns)
        targets = xp.where(one_hot, local, 0)
        rows = xp.arange(targets.size)
        own_top = logits.max(axis=-1)
        top = group.comm.all_reduce(own_top, op="max", algorithm=group.reduction)  # (N,)
        p = logits - top[:, None]
        # One rank has the logit of a row's target, and the others add 0.
        correct = xp.where(one_hot, p[rows, targets], 0)
        xp.exp(p, out=p)
        sums = xp.stack([group.row_sums(p), correct])  # (2, N)
        total, correct = group.comm.all_reduce(sums, algorithm=group.reduction)
        p /= total[:, None]
        self.save_for_backward(
            probabilities=p, rows=rows, targets=targets, counted=counted, one_hot=one_hot
        )
        return xp.where(counted, xp.log(total) - correct, 0).sum()

    def backward(self, grad: Array, **saved: Any) -> Gradients:  # type: ignore[override]
        return *super().backward(grad, **saved), None


def vocab_parallel_cross_entropy_sum(
    logits: Tensor, targets: Array, group: TensorGroup, vocab_size: int | None = None
) -> Tensor:
    """Compute `autograd.cross_entropy_sum` from this rank's columns of the logits, (B, T, V/t).

    `group` has the ranks that share the vocabulary: `head.group` of a ColumnParallelLinear.
    Every rank gets the same loss: log sum exp(logits) - logits[target] over the whole vocabulary.
    With N = B T, forward all-reduces N maxima, and then 2N sums: those of the exponentials and the
    targets' logits. Gathered logits would be N V elements. Backward sends nothing. UsageError for a
    target that is not below `vocab_size` (default: all ranks' columns), or for targets of another
    shape than (B, T) or flat.
    """
    if vocab_size is None:
        vocab_size = group.size * logits.shape[-1]
    check_targets(targets, logits.shape[:-1], vocab_size)
    return _VocabParallelCrossEntropy.apply(logits, targets, group)
