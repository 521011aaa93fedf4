"""Context parallelism: each of c ranks holds T/c tokens of every sample. Only attention needs the other ranks' tokens.

Activations are divided by c. A gradient covers this rank's tokens, so it is summed over dp and cp together. There are
three methods. A rank with u = B T/c tokens sends per layer, forward and backward together, these elements:

    ring         (6c-4) u h_kv              keys and values travel around the ranks; Liu et al. 2023 (2310.01889)
    all-gather   6(c-1) u h_kv              every rank gathers them; Llama 3 (2407.21783), section 3.3.2
    ulysses      4(h + h_kv) u (c-1)/c      each rank takes all tokens of some heads; Jacobs et al. 2023 (2309.14509)

Later tokens see more keys. In the order "contiguous" rank r holds the r-th part of the sequence, and the ranks of early
tokens wait for those of late ones: the efficiency tends to c/(2c-1). In the order "zigzag" the sequence is cut into 2c
chunks, rank r holds chunks r and 2c-1-r, and every rank has the same work in every step.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from minipar.autograd import Tensor, mapping
from minipar.autograd.attention import CausalAttention, attend, attend_backward, merge
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides
from minipar.nn.layers import Dropout, MaskSlice

METHODS = ("ring", "all-gather", "ulysses")
ORDERS = ("zigzag", "contiguous")
KV, GRADIENT = 0, 1  # tags of the ring's messages


def check_length(length: int, ranks: int, order: str) -> None:
    """Raise UsageError, with the arithmetic, if a sequence cannot be cut into equal parts."""
    chunks, what = (2 * ranks, "(2*cp)") if order == "zigzag" else (ranks, "cp")
    check_divides(f"seq-len/{what}", length, chunks, f"{order} has equal chunks")


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise UsageError, with the arithmetic, if Ulysses cannot give each rank whole heads."""
    for what, count in (("heads", heads), ("kv-heads", kv_heads)):
        check_divides(f"{what}/cp", count, ranks, f"ulysses cuts each tp rank's {what}")


def visible(order: str, rank: int, source: int, tokens: int) -> list[tuple[slice, slice]]:
    """Return which of a rank's `tokens` queries see which keys of rank `source`: one pair of slices, or none.

    Queries see the rank's own keys causally. They see all of the returned keys of another rank.
    """
    whole, half = slice(0, tokens), tokens // 2
    if rank == source:
        return [(whole, whole)]
    if order == "contiguous":
        return [(whole, whole)] if source < rank else []
    # Chunks (r, 2c-1-r) and (s, 2c-1-s): if s < r both of r's see s only, else only r's second one sees both of s's.
    return [(whole, slice(0, half))] if source < rank else [(slice(half, tokens), whole)]


class ContextParallel:
    """The ranks that share each sample's tokens, their method, and the order in which the tokens are dealt out."""

    def __init__(
        self, comm: Communicator, method: str = "ring", order: str = "zigzag", reduction: str = "ring",
        dtype: Any = None, reduce_dtype: Any = None,
    ) -> None:  # fmt: skip
        for what, value, choices in (("method", method, METHODS), ("order", order, ORDERS)):
            if value not in choices:
                raise UsageError(f"context parallelism: {what} {value!r}: expected {', '.join(choices)}")
        self.comm, self.method, self.reduction = comm, method, reduction
        self.dtype, self.reduce_dtype = dtype, reduce_dtype  # in which keys, values, and their gradients' sums travel
        self.rank, self.size = comm.rank, comm.size
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.order = order if comm.size > 1 else "contiguous"
        self.sources = [(self.rank - step) % self.size for step in range(self.size)]  # this rank, the left one, ...

    def places(self, length: int) -> np.ndarray:
        """Return the positions of each rank's tokens in a sequence of `length`: (c, T/c), each row ascending."""
        check_length(length, self.size, self.order)
        if self.order == "contiguous":
            return np.arange(length).reshape(self.size, -1)
        early, late = np.arange(length).reshape(2, self.size, -1)
        return np.concatenate([early, late[::-1]], axis=1)

    def part(self, x: Array, dim: int = 1) -> Array:
        """Return this rank's tokens of an array that holds whole sequences along `dim`: (B, T) -> (B, T/c)."""
        return x.take(self.places(x.shape[dim])[self.rank], axis=dim)

    def blocks(self, k: Array, v: Array) -> Iterator[tuple[int, Array]]:
        """Yield (rank, its keys and values), in the order of `sources`. k and v are this rank's.

        In the ring each rank passes to its right what it has from its left, while it computes with it.
        """
        comm, kv = self.comm, xp.ascontiguousarray(xp.stack([k, v], dtype=self.dtype))
        if self.method == "all-gather":
            gathered = comm.all_gather(kv, algorithm="pairwise" if self.reduction == "ordered" else "ring")
            gathered = gathered.reshape(-1, *kv.shape).astype(k.dtype, copy=False)
            yield from ((source, gathered[source]) for source in self.sources)
            return
        for source in self.sources:
            following, messages = xp.empty_like(kv), []
            if source != self.sources[-1]:
                messages = [comm.isend(kv, self.right, KV), comm.irecv(following, self.left, KV)]
            yield source, kv.astype(k.dtype, copy=False)
            for message in messages:
                message.wait()
            kv = following

    def sum_gradients(self, parts: Iterator[Array]) -> Array:
        """Return the sum over the ranks of the gradients of this rank's keys and values.

        `parts` are, in the order of `sources`, what this rank's queries add to each rank's. In the ring the sum travels
        with its block, beginning at the owner: each rank adds its part and passes it on, and the last of c hops brings
        it home. The all-gather's sum is a reduce-scatter.
        """
        comm = self.comm
        if self.method == "all-gather":
            by_rank = [part for _, part in sorted(zip(self.sources, parts, strict=True), key=lambda x: x[0])]
            by_rank = xp.stack(by_rank, dtype=self.reduce_dtype)
            return comm.reduce_scatter(by_rank, algorithm=self.reduction).reshape(by_rank.shape[1:])
        messages: list[Any] = []
        for part in (part.astype(self.reduce_dtype or part.dtype, copy=False) for part in parts):
            if messages:
                part += messages[1].wait()
                messages[0].wait()
            messages = [comm.isend(part, self.right, GRADIENT), comm.irecv(xp.empty_like(part), self.left, GRADIENT)]
        messages[0].wait()
        return messages[1].wait()

    def attend(self, q: Array, k: Array, v: Array, causal: bool, scale: float, keep: Any, keep_scale: float) -> Any:
        """Compute `attend` of this rank's queries and all ranks' keys. `keep`, with all keys, is (B, a, T/c, T)."""
        for source, block in self.blocks(k, v):
            for rows, columns in visible(self.order, self.rank, source, q.shape[2]):
                keys, values = block[:, :, :, columns]
                masks = self._masks(keep, q, source, rows, columns)
                part = attend(q[:, :, rows], keys, values, source == self.rank, scale, masks, keep_scale)
                if source == self.rank:  # this block comes first, and every query sees some of it
                    out, lse = part
                else:
                    out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *part)
        return out, lse

    def attend_backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, scale: float,
        keep: Any, keep_scale: float, gradients: Any,
    ) -> None:  # fmt: skip
        """Write the gradients of this rank's queries, keys and values."""
        dq, dk, dv = gradients
        dq[...] = 0

        def parts() -> Iterator[Array]:
            for source, block in self.blocks(k, v):
                part = xp.zeros_like(block)
                for rows, columns in visible(self.order, self.rank, source, q.shape[2]):
                    g, queries, o, sums = (x[:, :, rows] for x in (dout, q, out, lse))
                    keys, values = block[:, :, :, columns]
                    options = source == self.rank, scale, self._masks(keep, q, source, rows, columns), keep_scale
                    terms = attend_backward(g, queries, keys, values, o, sums, *options)
                    dq[:, :, rows] += terms[0]
                    part[0, :, :, columns], part[1, :, :, columns] = terms[1:]
                yield part

        dk[...], dv[...] = self.sum_gradients(parts())

    def _masks(self, keep: Any, q: Array, source: int, rows: slice, columns: slice) -> Any:
        keys = self.places(self.size * q.shape[2])[source, columns]
        return None if keep is None else keep.take(np.arange(q.shape[2])[rows], axis=2).take(keys, axis=3)

    def block_attention(
        self, qkv: Tensor, heads: int, kv_heads: int | None = None, keep: Any = None, probability: float = 0.0
    ) -> Tensor:
        """Compute `causal_attention` of whole sequences for this rank's tokens: (B, T/c, h + 2 h_kv) -> (B, T/c, h).

        Kept for backward are this rank's q, k, v and result, and one value per query and head.
        """
        functions = self.attend, self.attend_backward
        return CausalAttention.apply(qkv, heads, kv_heads or heads, keep, 1 / (1 - probability), functions)

    def ulysses(self, attention: Callable[..., Tensor], qkv: Tensor, heads: int, kv_heads: int | None = None,
        keep: Any = None, probability: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Compute `attention` of all tokens for this rank's heads: (B, T/c, h + 2 h_kv) -> (B, T/c, h)."""
        c, kv_heads = self.size, kv_heads or heads
        check_heads(heads, kv_heads, c)
        width = qkv.shape[-1] // (heads + 2 * kv_heads)  # of a head
        own = None if keep is None else keep.take(np.split(np.arange(heads), c)[self.rank], axis=1)  # of (B, a, T, T)
        columns = _columns(c, heads * width, kv_heads * width, kv_heads * width)
        whole = mapping(qkv, partial(self.to_heads, columns=columns), partial(self.to_tokens, columns=columns))
        y = attention(whole, heads // c, kv_heads // c, own, probability)  # (B, T, h/c)
        columns = _columns(c, heads * width)
        return mapping(y, partial(self.to_tokens, columns=columns), partial(self.to_heads, columns=columns))

    def to_heads(self, x: Array, columns: np.ndarray) -> Array:
        """Exchange this rank's tokens of all columns for all tokens of its own: (B, T/c, w) -> (B, T, w/c).

        `columns` (c, w/c) are each rank's. Sends all but 1/c of x. `to_tokens` is the inverse and the adjoint.
        """
        received = self._all_to_all(x[..., columns].transpose(2, 0, 1, 3))  # (c, B, T/c, w/c)
        whole = xp.empty((x.shape[0], self.size * x.shape[1], columns.shape[1]), dtype=x.dtype)
        whole[:, self.places(whole.shape[1])] = received.swapaxes(0, 1)
        return whole

    def to_tokens(self, x: Array, columns: np.ndarray) -> Array:
        """Exchange all tokens of this rank's columns for its tokens of all columns: (B, T, w/c) -> (B, T/c, w)."""
        received = self._all_to_all(x[:, self.places(x.shape[1])].swapaxes(0, 1))  # (c, B, T/c, w/c)
        own = xp.empty((*received.shape[1:3], columns.size), dtype=x.dtype)
        own[..., columns] = received.transpose(1, 2, 0, 3)
        return own

    def _all_to_all(self, x: Array) -> Array:
        return self.comm.all_to_all(xp.ascontiguousarray(x)).reshape(x.shape)


def _columns(ranks: int, *widths: int) -> np.ndarray:
    """Return which columns each rank gets if each of several stretches is split evenly: (c, sum(widths)/c)."""
    stretches = np.split(np.arange(sum(widths)), np.cumsum(widths)[:-1])
    return np.concatenate([stretch.reshape(ranks, -1) for stretch in stretches], axis=1)


def context_parallel(
    model: Any, comm: Communicator, method: str = "ring", order: str = "zigzag", reduction: str = "ring",
    reduce_dtype: Any = None,
) -> ContextParallel:  # fmt: skip
    """Let `model` work on this rank's tokens of each sample, in place: its attention, positions and dropout masks.

    Give it `context.part(x)` and `context.part(y)` of whole samples x and y, and wrap it over all ranks that hold other
    tokens (`mesh.dp_cp`): gradients add up over them, and the loss is divided by the count of all their targets.
    `reduction`, "ring" or "ordered", is the order in which "all-gather" adds the gradients of keys and values. They are
    added and sent in `reduce_dtype` (default: their own dtype), keys and values in the model's.

    UsageError if tokens or heads cannot be cut evenly, ValueError where positions end: each rank has a whole sequence.
    """
    context = ContextParallel(comm, method, order, reduction, model.dtype, reduce_dtype)
    c = context.size
    if c == 1:
        return context
    tokens, limit = partial(context.part, dim=0), model.config.n_positions

    def positions(count: int) -> Array:
        if c * count > limit:
            raise ValueError(f"{c} ranks * {count} tokens, but the model has {limit} positions: give context.part(x)")
        return from_host(tokens(np.arange(c * count)))

    model.positions = positions
    for _, module in model.named_modules():
        if isinstance(module, Dropout) and not module.name.endswith("attn_dropout"):
            module.mask_slices.insert(0, MaskSlice(1, c, tokens))  # of (B, T, h); outside a sequence-parallel cut
        elif isinstance(module, Dropout):  # of (B, a, T, T): this rank's queries and all keys, or all of both
            rows = np.asarray if method == "ulysses" else tokens
            module.mask_slices += [MaskSlice(2, c, rows), MaskSlice(3, c, np.asarray)]
        elif hasattr(module, "kv_heads"):
            ulysses = partial(context.ulysses, module.attention)
            module.attention = ulysses if method == "ulysses" else context.block_attention
        elif hasattr(module, "experts"):
            module.sum_loads = partial(comm.all_reduce, algorithm="ordered")
    return context
