"""Claims about attention: blocks of scores give what the whole matrix gives, in memory that grows with the length."""

import tracemalloc

import numpy as np
import pytest
import strict_array
from training import in_blocks, using

from minipar.autograd import Tensor, causal_attention, flop_counter
from minipar.autograd.gradcheck import gradcheck
from minipar.memory import MemoryLedger
from minipar.more.context import blockwise as module
from minipar.more.context.blockwise import (
    KEY_BLOCK,
    QUERY_BLOCK,
    attend,
    attend_backward,
    blockwise_attention,
    merge,
    use_blockwise,
)
from minipar.nn import GPT, Dropout, DropoutKeys, GPTConfig, dropping

RANDOM = np.random.Generator(np.random.Philox(35))
HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]  # of queries, of keys and values
LENGTHS = [1, 3, 4, 8, 13, 16, 19]  # blocks are 4 x 8


def normal(*shape):
    return RANDOM.standard_normal(shape)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 4)
    monkeypatch.setattr(module, "KEY_BLOCK", 8)


METHODS = {"full": causal_attention, "blockwise": in_blocks}


def run(qkv, weights, *arguments, method):
    """Return the output, and the gradient of its sum with these weights."""
    x = Tensor(qkv.copy(), requires_grad=True)
    y = method(x, *arguments)
    y.backward(weights)
    return y.data, x.grad


def naive(q, k, v, scale, causal):
    """Return (out, lse) from the definition, one whole matrix per query head; the keys repeated for its group."""
    k, v = (np.repeat(x, q.shape[2], axis=2) for x in (k, v))
    scores = scale * np.einsum("bngtd,bngsd->bngts", q, k)
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("bngts,bngsd->bngtd", np.exp(scores - lse[..., None]), v), lse


def problem(length, keys, heads, kv_heads, dim=3):
    """Return q (B, n, g, T, d), and k and v (B, n, 1, S, d)."""
    q = normal(2, kv_heads, heads // kv_heads, length, dim)
    return q, normal(2, kv_heads, 1, keys, dim), normal(2, kv_heads, 1, keys, dim)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_equal_the_whole_matrix(small_blocks, length, heads, kv_heads):
    qkv, weights = normal(2, length, (heads + 2 * kv_heads) * 3), normal(2, length, heads * 3)
    results = [run(qkv, weights, heads, kv_heads, method=method) for method in METHODS.values()]
    for full, blocks in zip(*results, strict=True):
        np.testing.assert_allclose(blocks, full, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [QUERY_BLOCK + 1, KEY_BLOCK + QUERY_BLOCK - 1, 2 * KEY_BLOCK])
def test_blocks_of_their_own_size_equal_the_whole_matrix(length):
    qkv, weights = normal(1, length, 16), normal(1, length, 8)
    results = [run(qkv, weights, 2, 1, method=method) for method in (causal_attention, blockwise_attention)]
    for full, blocks in zip(*results, strict=True):
        np.testing.assert_allclose(blocks, full, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("method", "probability"), [("full", 0.0), ("full", 0.25), ("blockwise", 0.0)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_gradients_of_grouped_heads(small_blocks, method, probability, heads, kv_heads):
    keep = RANDOM.random((2, heads, 9, 9)) >= probability if probability else None
    gradcheck(
        lambda x: METHODS[method](x, heads, kv_heads, keep, probability), [normal(2, 9, (heads + 2 * kv_heads) * 2)]
    )


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("length", "keys", "causal"), [(13, 13, True), (13, 13, False), (5, 19, False), (17, 1, False)]
)
def test_attend_follows_the_definition(small_blocks, length, keys, causal, heads, kv_heads):
    q, k, v = problem(length, keys, heads, kv_heads)
    for ours, theirs in zip(attend(q, k, v, 0.7, causal), naive(q, k, v, 0.7, causal), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_parts_of_the_keys_merge_to_the_whole(small_blocks, heads, kv_heads):
    """As in ring attention: forward by `merge`, backward as a sum over parts, each from the merged out and lse."""
    q, k, v = problem(13, 19, heads, kv_heads)
    dout = normal(*q.shape)
    out, lse = attend(q, k, v, 0.7, causal=False)
    gradients = attend_backward(dout, q, k, v, out, lse, 0.7, causal=False)
    parts = [(k[..., s, :], v[..., s, :]) for s in (slice(0, 5), slice(5, 19))]
    results = [attend(q, *part, 0.7, causal=False) for part in parts]
    merged = merge(*results[0], *results[1])
    for one, other in zip(merged, (out, lse), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
    terms = [attend_backward(dout, q, *part, *merged, 0.7, causal=False) for part in parts]
    np.testing.assert_allclose(terms[0][0] + terms[1][0], gradients[0], rtol=1e-12, atol=1e-13)
    for i in (1, 2):
        joined = np.concatenate([term[i] for term in terms], axis=-2)
        np.testing.assert_allclose(joined, gradients[i], rtol=1e-12, atol=1e-13)


def test_a_row_without_keys_merges_without_a_nan():
    out, lse = normal(2, 3, 4), normal(2, 3)
    lse[0, 1] = -np.inf
    out[0, 1] = 0
    nothing, never = np.zeros(out.shape), np.full(lse.shape, -np.inf)
    with np.errstate(all="raise"):
        for result in (merge(out, lse, nothing, never), merge(nothing, never, out, lse)):
            assert np.array_equal(result[0], out) and np.array_equal(result[1], lse)


def test_large_scores_neither_overflow_nor_vanish(small_blocks):
    """The first key of each row exceeds the others by thousands, and so do the blocks' maxima one another."""
    q = np.full((1, 1, 1, 13, 1), 1.0, np.float32)
    k = np.linspace(5000, -5000, 13, dtype=np.float32).reshape(q.shape)
    v = np.arange(13, dtype=np.float32).reshape(q.shape)
    for sign in (1, -1):
        out, lse = attend(q, sign * k, v, 1.0)
        expected = np.zeros(13) if sign == 1 else np.arange(13)
        assert np.array_equal(out.ravel(), expected) and np.isfinite(lse).all()
        assert all(np.isfinite(g).all() for g in attend_backward(v, q, sign * k, v, out, lse, 1.0))


def test_blocks_run_on_a_device(small_blocks):
    """All heads at a time, as on a GPU; they give what one head at a time gives."""
    q, k, v = problem(13, 13, 4, 2)
    dout = normal(*q.shape)
    out, lse = attend(q, k, v, 0.7)
    gradients = attend_backward(dout, q, k, v, out, lse, 0.7)
    with using(strict_array):
        q, k, v, dout = map(strict_array.asarray, (q, k, v, dout))
        on_device = attend(q, k, v, 0.7)
        on_device += attend_backward(dout, q, k, v, *on_device, 0.7)
        on_device += merge(*on_device[:2], *on_device[:2])
    for ours, theirs in zip(on_device, (out, lse, *gradients, out, lse + np.log(2)), strict=True):
        np.testing.assert_allclose(ours.get(), theirs, rtol=1e-12, atol=1e-13)


# ---- which method, and what it costs ---------------------------------------------------------------------------------


def test_dropout_keeps_the_whole_matrix_of_any_length():
    length = 2 * KEY_BLOCK
    qkv, weights, keep = normal(1, length, 3), normal(1, length, 1), RANDOM.random((1, 1, length, length)) >= 0.3
    results = [run(qkv, weights, 1, 1, keep, 0.3, method=method) for method in (causal_attention, blockwise_attention)]
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


def test_a_model_in_blocks_gives_what_it_gives_with_whole_scores():
    """From the second block of tokens on; the first is computed whole, bit for bit."""
    length = QUERY_BLOCK + 2
    model = GPT(GPTConfig(5, length, 6, 3, 2), dtype="float64")
    tokens = RANDOM.integers(0, 5, (2, length))
    expected = model(tokens).data
    assert use_blockwise(model) is model
    logits = model(tokens).data
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-13)
    assert not np.array_equal(logits, expected)
    assert np.array_equal(
        model(tokens[:, :QUERY_BLOCK]).data, GPT(model.config, dtype="float64")(tokens[:, :QUERY_BLOCK]).data
    )


@pytest.mark.parametrize("length", [1, 4, 13, 16])
def test_skipped_blocks_are_not_counted(small_blocks, length):
    """Two products of each computed block in forward, five in backward."""
    counts = []
    x = Tensor(normal(2, length, 8 * 3), requires_grad=True)
    with flop_counter(counts.append):
        y = in_blocks(x, 4, 2)
        forward = sum(counts)
        y.backward(normal(*y.shape))
    stops = [min(start + 4, length) for start in range(0, length, 4)]  # of the rows, and of the columns they compute
    pairs = sum((stop - start) * stop for start, stop in zip([0, *stops], stops, strict=False))
    assert forward == 2 * 2 * 2 * 4 * 3 * pairs
    assert sum(counts) - forward == 2 * 2 * 4 * 5 * 3 * pairs
    if length % 4 == 0:
        assert pairs == length * (length + 4) // 2


def peaks(method):
    """Return the bytes that forward and backward take at most, for 1024 and 2048 tokens."""
    found = []
    for length in (1024, 2048):
        x, weights = Tensor(normal(1, length, 12), requires_grad=True), normal(1, length, 4)
        tracemalloc.start()
        METHODS[method](x, 2).backward(weights)
        found.append(tracemalloc.get_traced_memory()[1] - QUERY_BLOCK * KEY_BLOCK * 8)
        tracemalloc.stop()
    return found


def test_memory_grows_with_the_length_not_its_square():
    blocks, full = peaks("blockwise"), peaks("full")
    assert blocks[1] < 2.2 * blocks[0]
    assert full[1] > 3.8 * full[0]


@pytest.mark.parametrize("length", [64, 320])
def test_the_ledger_counts_no_scores_in_blocks(length):
    """Kept: q, k and v, the output, and one log-sum-exp for each row. A full mask has a byte for each score."""
    for method, extra, p in (("full", length, 0.0), ("full", length, 0.1), ("blockwise", 1, 0.0)):
        with MemoryLedger().recording() as ledger, dropping(DropoutKeys(0, 0, [0, 1])):
            x = Tensor(normal(2, length, 12), requires_grad=True)
            y = METHODS[method](x, 2, None, Dropout("drop", p).mask((2, 2, length, length)), p)
            mask = 2 * 2 * length**2 if p else 0
            assert ledger.held["activations"] == 8 * 2 * length * (12 + 4 + 2 * extra) + mask
        del y


@pytest.mark.parametrize(("method", "probability"), [("full", 0.0), ("full", 0.3), ("blockwise", 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_keeps_and_returns_its_inputs_dtype(small_blocks, method, dtype, probability):
    length, heads = 19, 4
    keep = RANDOM.random((2, heads, length, length)) < 0.7 if probability else None
    x = Tensor(normal(2, length, 8 * 3).astype(dtype), requires_grad=True)
    y = METHODS[method](x, heads, 2, keep, probability)
    saved = y.node.saved
    kept = saved["p"] if method == "full" else saved["lse"]
    assert y.dtype == saved["out"].dtype == kept.dtype == dtype
    y.backward(np.ones(y.shape, dtype))
    assert x.grad.dtype == dtype
