"""Ulysses, a method of context parallelism: each rank computes attention of some heads for all tokens.

Jacobs et al. 2023 (arXiv 2309.14509). Between attentions a rank has T/c tokens of each sample. Before
attention one all-to-all exchanges these tokens, of all heads, for all tokens of 1/c of the heads.
The serial attention runs on them, and another all-to-all exchanges its result for this rank's T/c
tokens of all heads. Backward does the same in the opposite order.

Seams of the core: the model's function `attention`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from minipar.autograd.tensor import Tensor, mapping
from minipar.backend import Array, xp
from minipar.errors import check_divides
from minipar.more.context.token_order import ContextParallel


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise UsageError, with the arithmetic, if Ulysses cannot give each rank whole heads."""
    check_divides("heads/cp", heads, ranks, "ulysses cuts each tp rank's heads")
    check_divides("kv-heads/cp", kv_heads, ranks, "ulysses cuts each tp rank's kv-heads")


class UlyssesAttention:
    """`attention` of all tokens for this rank's heads. It is called as `causal_attention` is."""

    def __init__(self, attention: Callable[..., Tensor], context: ContextParallel) -> None:
        self.attention = attention
        self.context = context

    def __call__(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int | None = None,
        keep: Array | None = None,
        probability: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Compute attention: (B, T/c, h + 2 h_kv) -> (B, T/c, h).

        `keep` is None, as `context_parallel` refuses dropout. Sends 2 (h + h_kv) u (c-1)/c elements in
        forward, with u = B T/c tokens, and as many in backward.
        """
        c = self.context.size
        if kv_heads is None:
            kv_heads = heads
        check_heads(heads, kv_heads, c)
        head_size = qkv.shape[-1] // (heads + 2 * kv_heads)
        h = heads * head_size
        h_kv = kv_heads * head_size
        # 1. Get q, k and v of all tokens for this rank's heads.
        columns = columns_of_ranks(c, [h, h_kv, h_kv])
        forward = partial(self.to_heads, columns=columns)
        backward = partial(self.to_tokens, columns=columns)
        qkv = mapping(qkv, forward, backward)  # (B, T, (h + 2 h_kv)/c)
        # 2. Compute the serial attention of these heads.
        own_heads = heads // c
        own_kv_heads = kv_heads // c
        y = self.attention(qkv, own_heads, own_kv_heads)  # (B, T, h/c)
        # 3. Get the results of all heads for this rank's tokens.
        columns = columns_of_ranks(c, [h])
        forward = partial(self.to_tokens, columns=columns)
        backward = partial(self.to_heads, columns=columns)
        return mapping(y, forward, backward)  # (B, T/c, h)

    def to_heads(self, x: Array, columns: np.ndarray) -> Array:
        """Exchange this rank's tokens of all columns for all tokens of its own columns.

        (B, T/c, w) -> (B, T, w/c), where w is the number of all columns. Row r of `columns`
        (c, w/c) has those of rank r. Sends all but 1/c of x. `to_tokens` is the inverse, and the
        adjoint.
        """
        batch, tokens, _ = x.shape
        length = self.context.size * tokens
        selected = x[..., columns]  # (B, T/c, c, w/c)
        by_rank = selected.transpose(2, 0, 1, 3)  # (c, B, T/c, w/c)
        received = self.all_to_all(by_rank)  # (c, B, T/c, w/c)
        shape = (batch, length, columns.shape[1])
        whole = xp.empty(shape, dtype=x.dtype)
        whole[:, self.context.positions(length)] = received.swapaxes(0, 1)
        return whole

    def to_tokens(self, x: Array, columns: np.ndarray) -> Array:
        """Exchange all tokens of this rank's columns for its tokens of all columns.

        (B, T, w/c) -> (B, T/c, w). `to_heads` is the inverse, and the adjoint.
        """
        batch, length, _ = x.shape
        positions = self.context.positions(length)
        by_rank = x[:, positions].swapaxes(0, 1)  # (c, B, T/c, w/c)
        received = self.all_to_all(by_rank)  # (c, B, T/c, w/c)
        tokens = length // self.context.size
        shape = (batch, tokens, columns.size)
        own = xp.empty(shape, dtype=x.dtype)
        own[..., columns] = received.transpose(1, 2, 0, 3)
        return own

    def all_to_all(self, x: Array) -> Array:
        """Send x[r] to rank r, and return the parts that the ranks have sent, in their order."""
        received = self.context.comm.all_to_all(xp.ascontiguousarray(x))
        return received.reshape(x.shape)


def columns_of_ranks(ranks: int, widths: list[int]) -> np.ndarray:
    """Return the columns that each rank gets: (c, sum(widths)/c).

    The columns are stretches of these `widths`, such as q, k and v. Each rank gets 1/c of each.
    """
    ends = np.cumsum(widths)
    stretches = np.split(np.arange(ends[-1]), ends[:-1])
    parts = [stretch.reshape(ranks, -1) for stretch in stretches]
    return np.concatenate(parts, axis=1)
