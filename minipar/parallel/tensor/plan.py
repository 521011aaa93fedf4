"""The plan: which of the serial model's layers is split how. Applying it turns the model into its parallel self.

A transformer layer is two pairs of products. The first of each pair is split by columns, the second by rows: what lies
between (the heads' attention, the MLP's GELU) works on the columns that a rank has, and one sum at the end of each pair
is all that is sent (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from minipar.backend import Array, to_host, xp
from minipar.comm import Communicator
from minipar.errors import UsageError
from minipar.nn import GPT, Embedding, Linear, MaskSlice, Module, Parameter
from minipar.parallel.tensor.layers import (
    SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy_sum,
)
from minipar.parallel.tensor.mappings import TensorGroup

# The names of a block's layers and of the embedding, without "h.0.". c_attn holds the columns of q, k and v side by
# side; each of the three is split, so that a rank gets whole heads.
PLAN = {
    "wte": "vocab",
    "attn.c_attn": "column of 3",
    "attn.c_proj": "row",
    "mlp.c_fc": "column",
    "mlp.c_proj": "row",
}


@dataclass(frozen=True)
class Cut:
    """How one parameter is split over t ranks: along `dim`, within each of `groups` equal stretches of it; `size` is
    that dim's length in the serial model, padded with zeros to a multiple of groups*t.
    """

    dim: int
    groups: int
    size: int

    def shape(self, whole: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of each part of an array of shape `whole`."""
        length = self.groups * -(-self.size // (self.groups * ranks))
        return tuple(length if dim == self.dim else size for dim, size in enumerate(whole))

    def part(self, whole: Array, rank: int, ranks: int) -> Array:
        """This rank's part, an array of its own."""
        step = -(-self.size // (self.groups * ranks))
        padding = [(0, 0)] * whole.ndim
        padding[self.dim] = (0, step * self.groups * ranks - self.size)
        whole = xp.pad(whole, padding)
        stretches = xp.split(whole, self.groups, axis=self.dim)
        own = (slice(None),) * self.dim + (slice(rank * step, (rank + 1) * step),)
        return xp.concatenate([stretch[own] for stretch in stretches], axis=self.dim)

    def join(self, parts: Sequence[Array]) -> Array:
        """The whole from all ranks' parts, in rank order, padding removed."""
        pieces = [xp.split(part, self.groups, axis=self.dim) for part in parts]
        ordered = [piece[g] for g in range(self.groups) for piece in pieces]
        whole = xp.concatenate(ordered, axis=self.dim)
        return whole[(slice(None),) * self.dim + (slice(0, self.size),)]


class TensorParallel:
    """What a strategy must know of a model that `tensor_parallel` has split.

    cuts      the split parameters and how; all others are whole on every rank
    partial   whole parameters whose gradient on a rank covers its slice of the sequence only
    """

    def __init__(self, group: TensorGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.cuts: dict[Parameter, Cut] = {}
        self.partial: set[Parameter] = set()

    def split(self, parameter: Parameter, dim: int, groups: int = 1) -> None:
        """Leave this rank its part of the parameter."""
        cut = self.cuts[parameter] = Cut(dim, groups, parameter.shape[dim])
        shape = cut.shape(parameter.shape, self.group.size)
        parameter.map_value(shape, partial(cut.part, rank=self.group.rank, ranks=self.group.size))

    def sum_partial(self, parameters: Sequence[Parameter]) -> None:
        """Make the gradients of the replicated parameters among these whole. On the wire: one all-reduce over tp of
        their elements (with sequence parallelism; else nothing).
        """
        gradients = [p.grad for p in parameters if p in self.partial and p.grad is not None]
        if gradients:
            total = self.group.sum(xp.concatenate([gradient.reshape(-1) for gradient in gradients]))
            stop = 0
            for gradient in gradients:
                start, stop = stop, stop + gradient.size
                gradient[...] = total[start:stop].reshape(gradient.shape)

    def whole_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The serial model's shape."""
        cut = self.cuts.get(parameter)
        return (
            parameter.shape
            if cut is None
            else tuple(cut.size if dim == cut.dim else size for dim, size in enumerate(parameter.shape))
        )

    def whole(self, parameter: Parameter, part: Array) -> np.ndarray:
        """The serial model's array from this rank's `part` of it (the parameter's numbers, or its gradient's).

        Collective. On the wire: an all-gather, for a split parameter.
        """
        cut = self.cuts.get(parameter)
        if cut is None:
            return np.array(to_host(part), order="C")
        parts = self.group.comm.all_gather(xp.ascontiguousarray(part)).reshape(self.group.size, *part.shape)
        return np.array(to_host(cut.join(list(parts))), order="C")


def check_shape(heads: int, hidden: int, tp: int, sequence_length: int | None = None) -> None:
    """UsageError if tp ranks cannot share the heads, or the sequence where it is to be split."""
    if heads % tp:
        raise UsageError(f"heads/tp = {heads}/{tp} is not a whole number: each tensor-parallel rank has whole heads")
    if hidden % tp:
        raise UsageError(
            f"hidden/tp = {hidden}/{tp} is not a whole number: each tensor-parallel rank has whole columns"
        )
    if sequence_length is not None and sequence_length % tp:
        raise UsageError(
            f"seq-len/tp = {sequence_length}/{tp} is not a whole number: --sequence-parallel splits the tokens evenly"
        )


def tensor_parallel(model: GPT, comm: Communicator, reduction: str = "ring", sequence: bool = False) -> TensorParallel:
    """Split `model` over `comm` by the plan, in place: parameters keep their names and become this rank's part of the
    very numbers they had (or, deferred, would have had). UsageError if heads do not divide.

    On the wire per layer and microbatch: 8 B T h (t-1)/t elements per rank, as four all-reduces, or with `sequence` as
    four all-gathers and four reduce-scatters. The embedding adds 2 B T h (t-1)/t, the head as many, and the loss two
    all-reduces of B T and 2 B T elements.
    """
    check_shape(model.config.n_head, model.config.n_embd, comm.size)
    group = TensorGroup(comm, reduction)
    tensor = TensorParallel(group, sequence)
    for name, kind in PLAN.items():
        for root in [model] if kind == "vocab" else model.h:
            *path, last = name.split(".")
            parent = reduce(getattr, path, root)
            setattr(parent, last, _split(tensor, getattr(parent, last), kind))
    model.project = VocabParallelHead(model.config.vocab_size, group, sequence)
    model.criterion = partial(vocab_parallel_cross_entropy_sum, group=group)
    for block in model.h:
        block.attn.heads //= group.size
        block.attn.attn_dropout.mask_slice = MaskSlice(dim=1, index=group.rank, count=group.size)  # of (B, heads, T, T)
    if sequence:
        model.wpe = SequenceEmbedding(model.wpe.weight, group)
        for dropout in (model.drop, *(d for b in model.h for d in (b.attn.resid_dropout, b.mlp.dropout))):
            dropout.mask_slice = MaskSlice(dim=SEQUENCE, index=group.rank, count=group.size)  # of (B, T, h)
        tensor.partial = set(model.parameters()) - set(tensor.cuts)
    return tensor


def _split(tensor: TensorParallel, layer: Module, kind: str) -> Module:
    """The parallel layer in the place of a serial one, on the same parameters, which are split here."""
    group, sequence = tensor.group, tensor.sequence
    if isinstance(layer, Embedding):
        tensor.split(layer.weight, dim=0)
        return VocabParallelEmbedding(layer.weight, group, sequence)
    assert isinstance(layer, Linear) and layer.bias is not None
    if kind == "row":
        tensor.split(layer.weight, dim=0)
        return RowParallelLinear(layer.weight, layer.bias, group, sequence)
    stretches = 3 if kind == "column of 3" else 1
    tensor.split(layer.weight, dim=1, groups=stretches)
    tensor.split(layer.bias, dim=0, groups=stretches)
    return ColumnParallelLinear(layer.weight, layer.bias, group, sequence)
