"""Claims about attention over ranks: each step sends what it says, and no operation is left waiting."""

import numpy as np
import pytest
from training import Proxy

from minipar.autograd import Tensor, causal_attention
from minipar.comm import run_local
from minipar.parallel.context import (
    GRADIENT,
    KEYS_VALUES,
    AllGatherAttention,
    RingAttention,
    block_attention,
    make_block,
)
from minipar.parallel.token_order import ContextParallel


class Waited:
    """A message that notes that it was waited for."""

    def __init__(self, work, notes, name):
        self.work = work
        self.notes = notes
        self.name = name

    def wait(self):
        self.notes.append(self.name)
        return self.work.wait()


class Noting(Proxy):
    """A communicator that notes its messages, and which are waited for."""

    def __init__(self, comm):
        super().__init__(comm)
        self.begun = []
        self.ended = []

    def isend(self, x, to, tag):
        name = ("to", to, tag)
        self.begun.append(name)
        return Waited(self.comm.isend(x, to, tag), self.ended, name)

    def irecv(self, x, source, tag):
        name = ("from", source, tag)
        self.begun.append(name)
        return Waited(self.comm.irecv(x, source, tag), self.ended, name)


def test_every_message_of_the_ring_is_waited_for():
    """Blocks make c - 1 hops in forward and in backward, their gradients make c hops, to the right neighbour."""

    def rank(comm):
        over = Noting(comm)
        method = RingAttention(ContextParallel(over))
        qkv = Tensor(np.ones((1, 4, 6)), requires_grad=True)
        y = block_attention(method, qkv, 1)
        forward = list(over.begun)
        y.backward(np.ones(y.shape))
        return forward, over.begun[len(forward) :], sorted(over.begun) == sorted(over.ended)

    assert KEYS_VALUES != GRADIENT
    for r, (forward, backward, all_ended) in enumerate(run_local(3, rank)):
        right, left = (r + 1) % 3, (r - 1) % 3
        blocks = [("to", right, KEYS_VALUES), ("from", left, KEYS_VALUES)]
        sums = [("to", right, GRADIENT), ("from", left, GRADIENT)]
        assert forward == blocks * 2 and all_ended
        assert backward == [*blocks, *sums, *blocks, *sums, *sums]


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("dtypes", [(None, None), ("float32", "float32")])
def test_few_tokens_have_one_devices_values(kind, order, dtypes):
    """They have them also where blocks and sums travel in fewer bytes, up to the rounding of these."""
    draw = np.random.Generator(np.random.Philox(5)).standard_normal
    qkv, dy = draw((2, 12, 16)), draw((2, 12, 8))
    whole = Tensor(qkv, requires_grad=True)
    y = causal_attention(whole, 4, 2)
    y.backward(dy)

    def rank(comm):
        context = ContextParallel(comm, order)
        own = Tensor(context.part(qkv), requires_grad=True)
        dtype, reduce_dtype = dtypes
        out = block_attention(kind(context, dtype=dtype, reduce_dtype=reduce_dtype), own, 4, 2)
        out.backward(context.part(dy))
        return out.data - context.part(y.data), own.grad - context.part(whole.grad)

    bound = 1e-13 if dtypes == (None, None) else 1e-5
    for forward, backward in run_local(3, rank):
        assert np.abs(forward).max() < bound and np.abs(backward).max() < bound


def test_keys_and_values_travel_as_one_array():
    k, v = np.arange(12.0).reshape(1, 2, 1, 3, 2), -np.arange(12.0).reshape(1, 2, 1, 3, 2)
    for dtype in (None, "float32"):
        block = make_block(k.swapaxes(1, 3), v.swapaxes(1, 3), dtype)
        assert block.flags.c_contiguous and block.dtype == (dtype or "float64")
        assert np.array_equal(block, np.array([k.swapaxes(1, 3), v.swapaxes(1, 3)]))
