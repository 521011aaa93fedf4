"""Context parallelism: each of c ranks holds T/c tokens of every sample.

Only attention needs the other ranks' tokens. Activations are divided by c. A gradient covers this
rank's tokens, so it is summed over dp and cp together. There are three methods. A rank with
u = B T/c tokens sends these elements per layer, forward and backward together. The queries have h
columns, and the keys have h_kv:

    ring         (6c-4) u h_kv            keys and values travel; Liu et al. 2023 (2310.01889)
    all-gather   6(c-1) u h_kv            every rank gathers them; Llama 3 (2407.21783), 3.3.2
    ulysses      4(h + h_kv) u (c-1)/c    all tokens of some heads; Jacobs et al. 2023 (2309.14509)

The first two are in this file, the third is in ulysses.py. token_order.py says which tokens a rank
has. Read the loops below with its order "contiguous" first: a rank's queries see all keys of the
ranks before it, none of the ranks after it, and its own causally. In the order "zigzag" all of a
rank's queries see the first half of the block of a rank before it, and the second half of its
queries sees the whole block of a rank after it.

Arrays have the shapes of autograd/attention.py: queries are (B, n, g, T/c, d), keys and values are
(B, n, 1, T/c, d), where g query heads share each of the n heads of keys, and d is a head's columns.
A block is a rank's keys and values, (2, B, n, 1, T/c, d).

Seams of the core: the model's functions `attention` and `positions`.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd.tensor import Tensor
from minipar.backend import Array, from_host, xp
from minipar.comm.communicator import Communicator
from minipar.comm.work import Work
from minipar.more.context.blockwise import BlockwiseAttention, attend, attend_backward, merge
from minipar.more.context.context_guard import ContextGuard
from minipar.more.context.token_order import METHODS, ContextParallel, check_choice
from minipar.more.context.ulysses import UlyssesAttention
from minipar.nn.gpt import SelfAttention
from minipar.parallel.split_guards import check_split, note_split

KEYS_VALUES = 0  # the tags of the ring's messages
GRADIENT = 1


# ---- what a rank computes with one block ---------------------------------------------------------


def make_block(k: Array, v: Array, dtype: DTypeLike | None) -> Array:
    """Copy keys and values into one array that can travel: (2, B, n, 1, T/c, d)."""
    block = xp.stack([k, v], dtype=dtype)
    return xp.ascontiguousarray(block)


def attend_block(
    context: ContextParallel,
    source: int,
    q: Array,
    block: Array,
    scale: float,
    out: Array,
    lse: Array,
) -> None:  # fmt: skip
    """Merge into `out` and `lse` what this rank's queries see of the block of rank `source`.

    A rank's own block comes first, and sets `out` and `lse`: every query sees some of it.
    """
    own = source == context.rank
    for rows, columns in context.visible(source, q.shape[-2]):
        keys, values = block[..., columns, :]
        new_out, new_lse = attend(q[..., rows, :], keys, values, scale, causal=own)
        if not own:
            new_out, new_lse = merge(out[..., rows, :], lse[..., rows], new_out, new_lse)
        out[..., rows, :] = new_out
        lse[..., rows] = new_lse


def attend_block_backward(
    context: ContextParallel,
    source: int,
    dout: Array,
    q: Array,
    block: Array,
    out: Array,
    lse: Array,
    scale: float,
    dq: Array,
) -> Array:  # fmt: skip
    """Add to `dq` what a block contributes, and return what this rank adds to the block's gradient.

    The result has the block's shape. `out` and `lse` are the results of forward for all blocks.
    """
    dblock = xp.zeros_like(block)
    for rows, columns in context.visible(source, q.shape[-2]):
        own_rows = (..., rows, slice(None))
        keys, values = block[..., columns, :]
        dq_part, dkeys, dvalues = attend_backward(
            dout[own_rows], q[own_rows], keys, values,
            out[own_rows], lse[..., rows], scale, causal=source == context.rank,
        )  # fmt: skip
        dq[own_rows] += dq_part
        dblock[0, ..., columns, :] += dkeys
        dblock[1, ..., columns, :] += dvalues
    return dblock


# ---- the ring ------------------------------------------------------------------------------------


class RingAttention:
    """Attention in c steps, while the blocks travel around the ring of ranks.

    In step s rank r computes with the block of rank r-s. Meanwhile it sends this block to its right
    neighbour, rank r+1, and receives the next block from its left neighbour, rank r-1. All of these
    are modulo c. Blocks travel in `dtype`, and the sums of their gradients in `reduce_dtype`. None
    keeps the dtype that they have.
    """

    def __init__(
        self,
        context: ContextParallel,
        dtype: DTypeLike | None = None,
        reduce_dtype: DTypeLike | None = None,
    ) -> None:
        self.context = context
        self.comm = context.comm
        self.dtype = dtype
        self.reduce_dtype = reduce_dtype
        self.left = context.source(1)  # rank - 1
        self.right = context.source(-1)  # rank + 1

    def forward(self, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
        """Compute `attend` of this rank's queries and all ranks' keys.

        Sends 2 (c-1) u h_kv elements.
        """
        context = self.context
        out = xp.empty_like(q)
        lse = xp.empty(q.shape[:-1], dtype=q.dtype)
        block = make_block(k, v, self.dtype)
        for step in range(context.size):
            # 1. Pass the block on to the right, and receive the next one from the left, while this
            #    rank computes.
            next_block = xp.empty_like(block)
            messages: list[Work] = []
            if step < context.size - 1:
                messages.append(self.comm.isend(block, self.right, KEYS_VALUES))
                messages.append(self.comm.irecv(next_block, self.left, KEYS_VALUES))
            # 2. Attend to the block that is here, and merge the result with that of the blocks
            #    before. Attention computes in the dtype of q, also where blocks travel in 2 bytes.
            wide = block.astype(q.dtype, copy=False)
            attend_block(context, context.source(step), q, wide, scale, out, lse)
            # 3. Wait for the next block.
            for message in messages:
                message.wait()
            block = next_block
        return out, lse

    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, scale: float
    ) -> tuple[Array, Array, Array]:
        """Compute the gradients of this rank's queries, keys and values.

        The blocks travel around the ring again, and the sum of a block's gradient follows it. In
        each step a rank sends the block before it computes with it. Afterwards it adds its part to
        the sum that its left neighbour sent in the step before, and sends the sum to the right. The
        sum begins at the block's owner, and the last of its c hops brings it back to the owner.
        Sends (4c - 2) u h_kv elements.
        """
        context = self.context
        dq = xp.zeros_like(q)
        block = make_block(k, v, self.dtype)
        gradient_messages: list[Work] = []
        for step in range(context.size):
            # 1. Pass the block on, as in forward.
            next_block = xp.empty_like(block)
            messages: list[Work] = []
            if step < context.size - 1:
                messages.append(self.comm.isend(block, self.right, KEYS_VALUES))
                messages.append(self.comm.irecv(next_block, self.left, KEYS_VALUES))
            # 2. Add the block's part to the gradient of this rank's queries, and compute their part
            #    of the block's gradient.
            source = context.source(step)
            wide = block.astype(q.dtype, copy=False)
            dblock = attend_block_backward(context, source, dout, q, wide, out, lse, scale, dq)
            if self.reduce_dtype is not None:
                dblock = dblock.astype(self.reduce_dtype, copy=False)
            # 3. Receive the sum of this block's gradient over the ranks before, add this rank's part,
            #    and pass the sum on. The sum that was sent in the step before has to leave first.
            if step > 0:
                sent, received = gradient_messages
                dblock += received.wait()
                sent.wait()
            next_dblock = xp.empty_like(dblock)
            sent = self.comm.isend(dblock, self.right, GRADIENT)
            received = self.comm.irecv(next_dblock, self.left, GRADIENT)
            gradient_messages = [sent, received]
            # 4. Wait for the next block.
            for message in messages:
                message.wait()
            block = next_block
        # 5. The last sum to arrive is that of this rank's own block.
        sent, received = gradient_messages
        sent.wait()
        dk, dv = received.wait()
        return dq, dk, dv


# ---- the all-gather ------------------------------------------------------------------------------


class AllGatherAttention:
    """Attention to all blocks, which every rank gathers in forward and again in backward.

    Between the two a rank keeps its own block only. Blocks travel in `dtype`. Their gradients are
    summed in the order `reduction`, in `reduce_dtype`. None keeps the dtype that they have.
    """

    def __init__(
        self,
        context: ContextParallel,
        reduction: str = "ring",
        dtype: DTypeLike | None = None,
        reduce_dtype: DTypeLike | None = None,
    ) -> None:
        self.context = context
        self.comm = context.comm
        self.reduction = reduction
        self.dtype = dtype
        self.reduce_dtype = reduce_dtype

    def gather(self, k: Array, v: Array) -> Array:
        """Return all ranks' blocks: (c, 2, B, n, 1, T/c, d). Sends 2 (c-1) u h_kv elements."""
        block = make_block(k, v, self.dtype)
        algorithm = "pairwise" if self.reduction == "ordered" else "ring"
        blocks = self.comm.all_gather(block, algorithm=algorithm)
        blocks = blocks.reshape(self.context.size, *block.shape)
        return blocks.astype(k.dtype, copy=False)

    def forward(self, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
        """Compute `attend` of this rank's queries and all ranks' keys."""
        context = self.context
        blocks = self.gather(k, v)
        out = xp.empty_like(q)
        lse = xp.empty(q.shape[:-1], dtype=q.dtype)
        for step in range(context.size):
            source = context.source(step)
            attend_block(context, source, q, blocks[source], scale, out, lse)
        return out, lse

    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, scale: float
    ) -> tuple[Array, Array, Array]:
        """Compute the gradients of this rank's queries, keys and values.

        Sends 4 (c-1) u h_kv elements: half to gather the blocks, half to sum their gradients.
        """
        context = self.context
        blocks = self.gather(k, v)
        dq = xp.zeros_like(q)
        dtype = self.reduce_dtype or blocks.dtype
        dblocks = xp.empty(blocks.shape, dtype=dtype)
        for step in range(context.size):
            source = context.source(step)
            block = blocks[source]
            dblock = attend_block_backward(context, source, dout, q, block, out, lse, scale, dq)
            dblocks[source] = dblock
        own = self.comm.reduce_scatter(dblocks, algorithm=self.reduction)
        dk, dv = own.reshape(dblocks.shape[1:])
        return dq, dk, dv


# ---- the model -----------------------------------------------------------------------------------


def block_attention(
    method: RingAttention | AllGatherAttention,
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    keep: Array | None = None,
    probability: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `causal_attention` of whole sequences for this rank's tokens.

    (B, T/c, h + 2 h_kv) -> (B, T/c, h). Forward keeps this rank's q, k, v and result, and one value
    per query and head. `keep` is None, as `context_parallel` refuses dropout.
    """
    if kv_heads is None:
        kv_heads = heads
    return BlockwiseAttention.apply(qkv, heads, kv_heads, method.forward, method.backward)


def context_parallel(
    model: Any,
    comm: Communicator,
    method: str = "ring",
    order: str = "zigzag",
    reduction: str = "ring",
) -> ContextParallel:  # fmt: skip
    """Let `model` work on this rank's tokens of each sample, in place.

    Its attention and positions change. Give it `context.part(x)` and
    `context.part(y)` of whole samples x and y, and wrap it over all ranks that hold other tokens
    (`mesh.dp_cp`): gradients add up over them, and the loss is divided by the count of all their
    targets. `reduction`, "ring" or "ordered", is the order in which "all-gather" adds the gradients
    of keys and values. These gradients are added and sent in float32 at least, keys and values in
    the model's dtype.

    UsageError if tokens or heads cannot be cut evenly, and for a model with dropout. ValueError where
    positions end: each rank has a whole sequence.
    """
    check_choice("method", method, METHODS)
    check_split(model, "context_parallel", comm)
    context = ContextParallel(comm, order)
    note_split(model, "context_parallel", comm)
    if context.size == 1:
        return context
    ContextGuard(comm, model)
    c = context.size
    limit = model.config.n_positions
    sum_dtype = xp.promote_types(model.dtype, "float32")

    def positions(count: int) -> Array:
        """Return the positions of this rank's `count` tokens."""
        if c * count > limit:
            what = f"{c} ranks * {count} tokens, but the model has {limit} positions"
            raise ValueError(f"{what}: give context.part(x)")
        return from_host(context.part(np.arange(c * count), dim=0))

    def attention_of(serial: Any) -> Any:
        """Return what takes the place of a module's serial attention."""
        if method == "ulysses":
            return UlyssesAttention(serial, context)
        if method == "ring":
            return partial(block_attention, RingAttention(context, model.dtype, sum_dtype))
        gathered = AllGatherAttention(context, reduction, model.dtype, sum_dtype)
        return partial(block_attention, gathered)

    model.positions = positions
    for _, module in model.named_modules():
        if isinstance(module, SelfAttention):
            module.attention = attention_of(module.attention)
    return context
