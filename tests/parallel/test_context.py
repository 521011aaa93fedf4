"""Claims about context parallelism: who sees whom, equality with one device, bytes, work and memory."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from training import Proxy, config_for, trainer_for

from minipar.autograd import Tensor, causal_attention, flop_counter
from minipar.comm import Communicator, DeviceMesh, run_local
from minipar.comm.clock import Network
from minipar.errors import UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.more.context.context_parallel import (
    METHODS,
    AllGatherAttention,
    RingAttention,
    block_attention,
    context_parallel,
)
from minipar.more.context.token_order import ORDERS, ContextParallel, visible
from minipar.more.context.ulysses import UlyssesAttention
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.tensor.plan import tensor_parallel

B, HEADS, SIZE = 2, 8, 4
RANDOM = np.random.Generator(np.random.Philox(61))
WAYS = [(method, order) for method in METHODS for order in ORDERS]


# ---- who sees whom ---------------------------------------------------------------------------------------------------


def places_of(order, rank, ranks, length):
    """A rank's positions, written out once more."""
    cut = np.array_split(range(length), ranks if order == "contiguous" else 2 * ranks)
    return [*cut[rank]] if order == "contiguous" else [*cut[rank], *cut[2 * ranks - 1 - rank]]


def seen_pairs(order, rank, source, ranks, tokens):
    """The (query, key) positions of a block, as `visible` says."""
    own, other = (places_of(order, r, ranks, ranks * tokens) for r in (rank, source))
    seen = visible(order, rank, source, tokens)
    pairs = [(q, k) for rows, columns in seen for q in own[rows] for k in other[columns]]
    return [(q, k) for q, k in pairs if k <= q] if source == rank else pairs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_query_sees_itself_and_all_before_it_once(order, ranks):
    length = 4 * ranks
    pairs = [pair for r in range(ranks) for s in range(ranks) for pair in seen_pairs(order, r, s, ranks, 4)]
    assert sorted(pairs) == [(q, k) for q in range(length) for k in range(q + 1)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_lock_step_efficiency_is_the_published_fraction(order, ranks):
    """Work / (ranks * the sum over steps of the most that any rank does in it)."""
    n = 4
    steps = [[len(seen_pairs(order, r, (r - s) % ranks, ranks, n)) for r in range(ranks)] for s in range(ranks)]
    efficiency = Fraction(sum(map(sum, steps)), ranks * sum(map(max, steps)))
    assert efficiency == (1 if order == "zigzag" else Fraction(ranks * n + 1, (2 * ranks - 1) * n + 1))


@pytest.mark.parametrize("order", ORDERS)
def test_the_parts_of_all_ranks_are_the_sequence(order):
    x = RANDOM.integers(0, 9, (3, 24))
    parts = run_local(4, lambda comm: (ContextParallel(comm, order=order).part(x), comm.rank))
    for part, rank in parts:
        assert np.array_equal(part, x[:, places_of(order, rank, 4, 24)])


# ---- attention: one device's, and its bytes --------------------------------------------------------------------------


def over_ranks(context, method, reduction="ring", dtype=None):
    """The function that takes the place of `causal_attention`. Blocks and sums travel in `dtype`."""
    if method == "ulysses":
        return UlyssesAttention(causal_attention, context)
    if method == "ring":
        return partial(block_attention, RingAttention(context, dtype, dtype))
    return partial(block_attention, AllGatherAttention(context, reduction, dtype, dtype))


def attention(comm, method, order, kv_heads=HEADS, probability=0.0, reduction="ring", dtype=None, length=48):
    """This rank's (part of one device's result, own; one device's gradient, own; elements sent forward, in all)."""
    random = np.random.Generator(np.random.Philox(62))
    qkv, dy = (random.standard_normal((B, length, heads * SIZE)) for heads in (HEADS + 2 * kv_heads, HEADS))
    keep = random.random((B, HEADS, length, length)) >= probability if probability else None
    whole = Tensor(qkv, requires_grad=True)
    y = causal_attention(whole, HEADS, kv_heads, keep, probability)
    y.backward(dy)
    context = ContextParallel(comm, order)
    own = Tensor(context.part(qkv), requires_grad=True)
    out = over_ranks(context, method, reduction, dtype)(own, HEADS, kv_heads, keep, probability)
    forward = comm.traffic.bytes() // 8
    out.backward(context.part(dy))
    return context.part(y.data), out.data, context.part(whole.grad), own.grad, forward, comm.traffic.bytes() // 8


@pytest.mark.parametrize(("method", "order"), [way for way in WAYS if way[0] != "ulysses"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_attention_over_ranks_is_one_devices(method, order, ranks):
    for y, out, dqkv, gradient, *_ in run_local(ranks, attention, method, order, HEADS):
        np.testing.assert_allclose(out, y, rtol=0, atol=1e-14)
        np.testing.assert_allclose(gradient, dqkv, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_blocks_and_sums_may_travel_in_fewer_bytes(method):
    """Up to their rounding it is one device's; each element takes half as many bytes."""
    whole, rounded = (run_local(3, attention, method, "zigzag", 4, 0.0, "ring", dtype) for dtype in (None, "float32"))
    for (*_, sent), (y, out, dqkv, gradient, _, halved) in zip(whole, rounded, strict=True):
        assert 0 < np.abs(out - y).max() < 1e-5 and 0 < np.abs(gradient - dqkv).max() < 1e-5
        assert 2 * halved == sent


@pytest.mark.parametrize(("ranks", "order"), [(2, "contiguous"), (2, "zigzag"), (4, "contiguous"), (8, "zigzag")])
def test_ulysses_has_the_bits_of_one_device(order, ranks):
    for y, out, dqkv, gradient, *_ in run_local(ranks, attention, "ulysses", order, HEADS):
        assert np.array_equal(out, y) and np.array_equal(gradient, dqkv)


@pytest.mark.parametrize("order", ORDERS)
def test_the_ring_and_the_gather_add_up_the_same(order):
    """Forward takes the blocks in one order; gradients of keys and values are added in another."""
    ring, gathered = (run_local(4, attention, method, order) for method in ("ring", "all-gather"))
    for (_, a, _, da, *_), (_, b, _, db, *_) in zip(ring, gathered, strict=True):
        queries = HEADS * SIZE
        assert np.array_equal(a, b) and np.array_equal(da[..., :queries], db[..., :queries])
        np.testing.assert_allclose(da, db, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "reduction"), [(2, 8, "ring"), (3, 4, "ordered"), (4, 2, "ring"), (8, 8, "ordered")]
)
def test_attention_sends_the_published_elements(ranks, kv_heads, reduction):
    u, h, h_kv, c = B * 48 // ranks, HEADS * SIZE, kv_heads * SIZE, ranks
    expected = {"ring": (2 * (c - 1) * u * h_kv, (6 * c - 4) * u * h_kv)}
    expected["all-gather"] = (2 * (c - 1) * u * h_kv, 6 * (c - 1) * u * h_kv)
    if HEADS % c == kv_heads % c == 0:
        expected["ulysses"] = (2 * (h + h_kv) * u * (c - 1) // c, 4 * (h + h_kv) * u * (c - 1) // c)
    for method, elements in expected.items():
        for *_, forward, both in run_local(ranks, attention, method, "zigzag", kv_heads, 0.0, reduction):
            assert (forward, both) == elements, method


def operations(comm, method, order, network=None):
    """The operations of this rank's forward, and the time that they take, with a message's, at one per second."""
    comm = Communicator(comm.transport, clock="model", network=network)
    counted = []
    compute = over_ranks(ContextParallel(comm, order), method)
    qkv = Tensor(np.ones((1, 16, 3 * HEADS * SIZE)))

    def count(flops):
        counted.append(flops)
        comm.clock.advance(flops)

    with flop_counter(count):
        compute(qkv, HEADS)
    return sum(counted), comm.clock.now()


@pytest.mark.parametrize("method", METHODS)
def test_counted_work_is_the_squares_that_a_rank_sees(method):
    """In squares of 16 queries and keys, the diagonal's as a whole: r + 1 by rank, or (c+1)/2 on every rank."""
    square, c = 2 * 2 * HEADS * SIZE * 16 * 16, 4
    work = {order: [count for count, _ in run_local(c, operations, method, order)] for order in ORDERS}
    if method == "ulysses":
        assert work["zigzag"] == work["contiguous"] == [square * c * c // c] * c
    else:
        assert work["contiguous"] == [square * (rank + 1) for rank in range(c)]
        assert work["zigzag"] == [square * (c + 1) // 2] * c


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_block_travels_while_this_one_is_computed(order):
    """Messages that take as long as half a square are not seen. Ones that take three squares are, less a product."""
    square = 2 * 2 * HEADS * SIZE * 16 * 16
    seen = {}
    for squares in (0, 0.5, 3):
        timed = run_local(4, operations, "ring", order, Network(alpha=squares * square))
        seen[squares] = max(seconds for _, seconds in timed) / square
    assert seen[0] == seen[0.5] == (2.5 if order == "zigzag" else 4)
    assert seen[3] == 3 * 3 + (0.5 if order == "zigzag" else 1)


# ---- a model ---------------------------------------------------------------------------------------------------------

X = RANDOM.integers(0, VOCAB, (3, 48))
Y = np.where(RANDOM.random((3, 48)) < 0.2, -100, RANDOM.integers(0, VOCAB, (3, 48)))  # targets are not spread evenly


def gradients(comm, method, order="zigzag", recompute=False):
    model = GPT(GPTConfig(VOCAB, 48, 24, 2, 24), seed=4, dtype="float64", recompute=recompute)
    context = context_parallel(model, comm, method, order)
    ddp = DistributedDataParallel(model, comm)
    loss = ddp.loss(context.part(X), context.part(Y))
    loss.backward()
    return loss.item(), {name: p.grad.copy() for name, p in model.named_parameters()}


def one_device(method):
    return run_local(1, gradients, method)[0]


@pytest.mark.parametrize(
    ("ranks", "method", "order", "recompute"),
    [
        (2, "ring", "zigzag", False),
        (3, "ring", "contiguous", True),
        (4, "all-gather", "zigzag", True),
        (2, "all-gather", "contiguous", False),
        (8, "ulysses", "zigzag", True),
        (4, "ulysses", "contiguous", False),
    ],
)
def test_a_model_has_one_devices_loss_and_gradients(ranks, method, order, recompute):
    loss, expected = one_device(method)
    for own, found in run_local(ranks, gradients, method, order, recompute):
        assert own == pytest.approx(loss, rel=1e-14)
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-13 * np.abs(gradient).max(), err_msg=name)


def test_one_rank_changes_nothing():
    def rank(comm):
        model = GPT(GPTConfig(VOCAB, 7, 24, 1, 4), seed=4)
        before = model.h[0].attn.attention
        context = context_parallel(model, comm)
        return model.h[0].attn.attention is before and np.array_equal(context.part(X[:, :7]), X[:, :7])

    assert run_local(1, rank) == [True]


@pytest.mark.parametrize("method", METHODS)
def test_tensor_and_context_parallelism_go_on_in_either_order(method):
    def loss(comm, context_first):
        mesh = DeviceMesh(comm, tp=2, cp=2)
        model = GPT(GPTConfig(VOCAB, 48, 24, 2, 24), seed=4, dtype="float64")
        if context_first:
            context = context_parallel(model, mesh.cp, method)
        tensor = tensor_parallel(model, mesh.tp, sequence=True)
        if not context_first:
            context = context_parallel(model, mesh.cp, method)
        ddp = DistributedDataParallel(model, mesh.dp_cp, before_reduce=tensor.sum_partial)
        return ddp.loss(context.part(X), context.part(Y)).item()

    for context_first in (False, True):
        assert run_local(4, loss, context_first) == [pytest.approx(one_device(method)[0], rel=1e-14)] * 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_the_library_refuses_too():
    def rank(comm):
        context = ContextParallel(comm)
        model = GPT(GPTConfig(VOCAB, 48, 24, 1, 8))
        for call in (
            lambda: context.part(X[:, :6]),
            lambda: over_ranks(context, "ulysses")(Tensor(np.zeros((1, 8, 9))), 3),
            lambda: context_parallel(model, comm, "rings"),
            lambda: ContextParallel(comm, order="striped"),
        ):
            with pytest.raises(UsageError, match="6/4|3/2|rings|striped"):
                call()
        context_parallel(model, comm)
        with pytest.raises(ValueError, match="48"):
            model(X)  # every rank has the whole sequence

    run_local(2, rank)


# ---- memory and messages ---------------------------------------------------------------------------------------------

SHAPE = f"--layers 2 --hidden 24 --heads 8 --seq-len 48 --vocab-size {VOCAB} --dtype float64 --eps 1e-5 --steps 2"


@pytest.mark.parametrize("method", METHODS)
def test_activations_are_divided_by_cp(method):
    """Of a step's peak, to a tenth: what a method receives for a moment is not kept for backward."""

    def activations(flags):
        config = config_for(f"{SHAPE} --hidden 48 --seq-len {length} --global-batch 4 {flags}")

        def rank(comm):
            ledger = MemoryLedger()
            with ledger.recording():
                trainer_for(config, TEXT, comm).step(0)
            return max(held[KINDS.index("activations")] for _, held in ledger.moments)

        return run_local(config.cp, rank)

    # One device keeps the scores of up to 128 tokens, as Ulysses' ranks do; of more, as the others', it keeps none.
    length = 96 if method == "ulysses" else 192
    (one,), ranks = activations(""), activations(f"--cp 4 --context-parallel {method}")
    assert all(own == pytest.approx(one / 4, rel=0.1) for own in ranks)


class Waited(Proxy):
    """A message that notes that it was waited for."""

    def __init__(self, work, ended):
        super().__init__(work)
        self.ended = ended

    def wait(self):
        self.ended.append(self.comm)
        return self.comm.wait()


class Noting(Proxy):
    """A communicator that notes its messages, and which are waited for."""

    def __init__(self, comm):
        super().__init__(comm)
        self.begun, self.ended = [], []

    def begin(self, work):
        self.begun.append(work)
        return Waited(work, self.ended)

    def isend(self, x, to, tag):
        return self.begin(self.comm.isend(x, to, tag))

    def irecv(self, x, source, tag):
        return self.begin(self.comm.irecv(x, source, tag))


def test_every_message_of_the_ring_is_waited_for():
    """Blocks make c - 1 hops in forward and in backward, their gradients make c hops; a hop is a send and a receive."""

    def rank(comm):
        over = Noting(comm)
        y = over_ranks(ContextParallel(over), "ring")(Tensor(np.ones((1, 4, 6)), requires_grad=True), 1)
        forward = len(over.begun)
        y.backward(np.ones(y.shape))
        assert set(map(id, over.begun)) == set(map(id, over.ended))
        return forward, len(over.begun) - forward

    assert run_local(3, rank) == [(2 * 2, 2 * (2 + 3))] * 3
