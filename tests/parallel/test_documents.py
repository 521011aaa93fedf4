"""Claims about context parallelism of packed documents: who sees whom, even work, one device's values, same bytes."""

from functools import partial

import numpy as np
import pytest
from combinations import VOCAB

from minipar.autograd import Tensor, causal_attention, flop_counter, packed
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig
from minipar.parallel.context import AllGatherAttention, RingAttention, block_attention, context_parallel
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.token_order import ALL_ORDERS, ContextParallel, deal_documents, visible_in_documents
from minipar.parallel.ulysses import UlyssesAttention

B, HEADS, SIZE = 3, 4, 4
RANDOM = np.random.Generator(np.random.Philox(81))
LENGTHS = [[48], [1, 2, 30, 7, 8], [5, 5, 5, 5, 5, 5, 5, 5, 5, 3]]
IDS = np.array([[place for n in sample for place in range(n)] for sample in LENGTHS])

# ---- who sees whom ---------------------------------------------------------------------------------------------------


def seen_pairs(ids, queries, keys, is_own) -> list[tuple[int, int]]:
    """The (query, key) positions that one rank computes with another's keys, in one sample."""
    seen = visible_in_documents(ids, queries, keys, is_own)
    pairs = [(q, k) for rows, columns in seen for q in queries[rows] for k in keys[columns]]
    return [(q, k) for q, k in pairs if k <= q] if is_own else pairs


@pytest.mark.parametrize("order", ALL_ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_query_sees_its_document_up_to_itself_once(order, ranks):
    with packed(IDS):
        positions = run_local(ranks, lambda comm: ContextParallel(comm, order).positions(48))[0]
    for i, ids in enumerate(IDS):
        own = [np.broadcast_to(part, (B, part.shape[-1]))[i] for part in positions]
        pairs = [pair for r in range(ranks) for s in range(ranks) for pair in seen_pairs(ids, own[r], own[s], r == s)]
        assert sorted(pairs) == [(q, k) for q in range(48) for k in range(q - ids[q], q + 1)]


def test_documents_of_equal_chunks_are_dealt_as_zigzag():
    ids = np.concatenate([np.arange(8), np.arange(4)])[None]
    assert deal_documents(ids, 2)[:, 0].tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_the_tokens_that_do_not_divide_are_dealt_to_and_fro():
    """Documents of 3, 3 and 2 tokens on two ranks: 0 1 1 | 0 0 1 | 1 0."""
    ids = np.array([[0, 1, 2, 0, 1, 2, 0, 1]])
    assert deal_documents(ids, 2)[:, 0].tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]


# ---- even work -------------------------------------------------------------------------------------------------------


def text_of_documents(length: int, mean: float) -> np.ndarray:
    """Position ids (1, T) of documents whose lengths are drawn from a heavy-tailed distribution."""
    ids: list[int] = []
    while len(ids) < length:
        ids += range(1 + int(RANDOM.lognormal(np.log(mean), 1.0)))
    return np.array([ids[:length]])


def lock_step_efficiency(positions, ids) -> float:
    """Work / (ranks * the sum over the ring's steps of the most that any rank has in it), in pairs of tokens."""
    c = len(positions)
    steps = np.zeros((c, c))
    for rank in range(c):
        for step in range(c):
            source = (rank - step) % c
            for rows, columns in visible_in_documents(ids, positions[rank], positions[source], step == 0):
                n, m = rows.stop - rows.start, columns.stop - columns.start
                steps[step, rank] += n * (n + 1) // 2 if step == 0 else n * m
    return steps.sum() / (c * steps.max(axis=1).sum())


@pytest.mark.parametrize(("length", "mean", "least"), [(8192, 400, 0.98), (2048, 100, 0.94)])
def test_the_order_of_documents_is_even(length, mean, least):
    """On 8 ranks each step of the ring is nearly even; zigzag over whole samples is not."""
    ids = text_of_documents(length, mean)
    even = lock_step_efficiency(deal_documents(ids, 8)[:, 0], ids[0])
    early, late = np.arange(length).reshape(2, 8, -1)
    zigzag = lock_step_efficiency(np.concatenate([early, late[::-1]], axis=1), ids[0])
    assert even > least and zigzag < 0.6


# ---- attention and models: one device's, and its bytes ---------------------------------------------------------------


def over_ranks(context, method):
    """The function that takes the place of `causal_attention`."""
    if method == "ulysses":
        return UlyssesAttention(causal_attention, context)
    return partial(block_attention, (RingAttention if method == "ring" else AllGatherAttention)(context))


def attention(comm, method, order, ids):
    """This rank's result and gradient, and those parts of one device's; its operations and bytes."""
    random = np.random.Generator(np.random.Philox(62))
    qkv, dy = (random.standard_normal((B, 48, heads * SIZE)) for heads in (3 * HEADS, HEADS))
    counted: list[int] = []
    with packed(ids):
        whole = Tensor(qkv, requires_grad=True)
        y = causal_attention(whole, HEADS)
        y.backward(dy)
        context = ContextParallel(comm, order)
        own = Tensor(context.part(qkv), requires_grad=True)
        with flop_counter(counted.append):
            out = over_ranks(context, method)(own, HEADS)
            out.backward(context.part(dy))
        expected = context.part(y.data), context.part(whole.grad)
    return out.data, own.grad, *expected, sum(counted), comm.traffic.bytes()


@pytest.mark.parametrize(
    ("method", "order", "ranks"),
    [
        ("ring", "documents", 3),
        ("ring", "zigzag", 4),
        ("ring", "contiguous", 2),
        ("all-gather", "documents", 8),
        ("all-gather", "zigzag", 2),
        ("all-gather", "contiguous", 3),
        ("ulysses", "zigzag", 4),
        ("ulysses", "contiguous", 2),
    ],
)
def test_attention_over_ranks_is_one_devices(method, order, ranks):
    plain = [count for *_, count in run_local(ranks, attention, method, "contiguous", None)]
    for rank, (out, gradient, y, dqkv, _, count) in enumerate(run_local(ranks, attention, method, order, IDS)):
        np.testing.assert_allclose(out, y, rtol=0, atol=1e-14)
        np.testing.assert_allclose(gradient, dqkv, rtol=0, atol=1e-13)
        assert count == plain[rank]  # documents change no byte


def test_no_rank_computes_across_a_boundary():
    """Documents of one token: each rank multiplies its tokens' own queries and keys, and those alone."""
    ids = np.zeros((B, 48), int)
    for method in ("ring", "all-gather"):
        for *_, operations, _ in run_local(4, attention, method, "documents", ids):
            forward, backward = 2, 5  # products of (1, SIZE) with (SIZE, 1)
            assert operations == B * 12 * HEADS * (forward + backward) * 2 * SIZE


def model_of(name, recompute=False):
    if name == "gpt2":
        return GPT(GPTConfig(VOCAB, 48, 16, 2, 4), seed=4, dtype="float64", recompute=recompute)
    return Llama(LlamaConfig(VOCAB, 16, 24, 2, 4, 4, 48), seed=4, dtype="float64", recompute=recompute)


X = RANDOM.integers(0, VOCAB, (B, 48))
Y = np.where(RANDOM.random((B, 48)) < 0.2, -100, RANDOM.integers(0, VOCAB, (B, 48)))


def gradients(comm, name, method, order="zigzag", recompute=False):
    model = model_of(name, recompute)
    context = context_parallel(model, comm, method, order)
    ddp = DistributedDataParallel(model, comm)
    with packed(IDS):
        loss = ddp.loss(context.part(X), context.part(Y))
    loss.backward()
    return loss.item(), {name: p.grad.copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "method", "order"),
    [
        ("gpt2", "ring", "documents"),
        ("llama", "ring", "zigzag"),
        ("llama", "all-gather", "documents"),
        ("gpt2", "ulysses", "contiguous"),
        ("llama", "ulysses", "zigzag"),
    ],
)
def test_a_model_has_one_devices_loss_and_gradients(name, method, order):
    loss, expected = run_local(1, gradients, name, method)[0]
    for own, found in run_local(4, gradients, name, method, order, order != "zigzag"):
        assert own == pytest.approx(loss, rel=1e-13)
        for key, gradient in expected.items():
            np.testing.assert_allclose(found[key], gradient, rtol=0, atol=1e-12 * np.abs(gradient).max(), err_msg=key)


@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_a_changed_token_moves_its_document_alone_on_all_ranks(method):
    sample, place, tokens = 1, 5, slice(3, 33)  # the document of 30 tokens

    def moved(comm):
        model = model_of("llama")
        context = context_parallel(model, comm, method, "documents")
        changed = X.copy()
        changed[sample, place] = (changed[sample, place] + 1) % VOCAB
        with packed(IDS):
            difference = model(context.part(X)).data != model(context.part(changed)).data
            expected = np.zeros(X.shape, bool)
            expected[sample, place : tokens.stop] = True
            return np.array_equal(difference.any(axis=-1), context.part(expected))

    assert run_local(4, moved) == [True] * 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_the_order_of_documents_needs_documents():
    def rank(comm):
        context = ContextParallel(comm, "documents")
        model = model_of("llama")
        qkv = Tensor(np.zeros((B, 24, 3 * HEADS)))
        calls = [lambda: context.part(X), lambda: over_ranks(context, "ring")(qkv, HEADS)]
        context_parallel(model, comm, order="documents")
        calls.append(lambda: model(X[:, :24]))
        for call in calls:
            with pytest.raises(UsageError, match="documents"):
                call()
        with packed(IDS), pytest.raises(UsageError, match=r"\(3, 48\)"):
            model(context.part(X)[:2])
        with pytest.raises(UsageError, match="documents"):
            context_parallel(model_of("gpt2"), comm, "ulysses", "documents")

    run_local(2, rank)
