"""Claims about documents that are packed into samples: each is computed as alone, and nothing across a boundary."""

from contextlib import nullcontext

import numpy as np
import pytest
from training import with_attention

from minipar.autograd import Tensor, causal_attention, checkpoint, flop_counter, packed
from minipar.autograd import attention as attention_module
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig, Mixtral, MixtralConfig

RANDOM = np.random.Generator(np.random.Philox(71))
VOCAB, LENGTH = 19, 24
LENGTHS = [[24], [5, 19], [1, 1, 10, 7, 5], [12, 11, 1]]  # of the documents of each sample


def ids_of(lengths) -> np.ndarray:
    """The position ids of samples with documents of these lengths, written out once more."""
    return np.array([[place for n in sample for place in range(n)] for sample in lengths])


def documents() -> list[tuple[int, slice]]:
    """The sample and the tokens of each document."""
    ends = [np.cumsum(sample).tolist() for sample in LENGTHS]
    return [(i, slice(e - n, e)) for i, sample in enumerate(LENGTHS) for n, e in zip(sample, ends[i], strict=True)]


IDS = ids_of(LENGTHS)
TOKENS, TARGETS = RANDOM.integers(0, VOCAB, (2, len(LENGTHS), LENGTH))
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
SIZES |= {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
MODELS = {
    "gpt2": (GPT, GPTConfig(vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)),
    "llama": (Llama, LlamaConfig(**SIZES)),
    "mixtral": (Mixtral, MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)),
}
METHODS = ["full", "blockwise"]


def model_of(name: str, method: str = "auto", recompute: bool = False):
    """A model whose weights are large enough for every term of attention to matter."""
    kind, config = MODELS[name]
    model = with_attention(kind(config, seed=3, dtype="float64", recompute=recompute), method)
    for p in model.parameters():
        p.data += RANDOM.standard_normal(p.shape) * 0.3
    return model


def loss_and_gradient(model, x, y, ids=None) -> tuple[float, dict[str, np.ndarray]]:
    model.zero_grad()
    with packed(ids):
        loss = model.loss_sum(x, y)
    loss.backward()  # outside of the block
    for p in model.parameters():
        p.fold_tied_gradients()
    return loss.item(), {name: p.grad.copy() for name, p in model.named_parameters()}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of which every document of some length has several."""
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 4)
    monkeypatch.setattr(attention_module, "KEY_BLOCK", 8)


# ---- a document in a sample is a document alone ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_document_has_its_logits_alone(name, method, small_blocks):
    model = model_of(name, method)
    with packed(IDS):
        logits = model(TOKENS).data
    for sample, tokens in documents():
        alone = model(TOKENS[[sample], tokens]).data
        np.testing.assert_allclose(logits[[sample], tokens], alone, rtol=0, atol=1e-12 * np.abs(alone).max())


@pytest.mark.parametrize(
    ("name", "method", "recompute"),
    [("gpt2", "full", False), ("gpt2", "blockwise", True), ("llama", "full", True), ("mixtral", "blockwise", False)],
)
def test_a_packed_document_has_its_gradient_alone(name, method, recompute, small_blocks):
    """The targets of all other documents are ignored: what is left is the document's own loss and gradient."""
    model = model_of(name, method, recompute)
    for sample, tokens in documents()[::3]:
        targets = np.full_like(TARGETS, -100)
        targets[sample, tokens] = TARGETS[sample, tokens]
        loss, gradient = loss_and_gradient(model, TOKENS, targets, IDS)
        own_loss, own = loss_and_gradient(model, TOKENS[[sample], tokens], TARGETS[[sample], tokens])
        assert loss == pytest.approx(own_loss, rel=1e-12)
        largest = max(np.abs(array).max() for array in own.values())
        for key, array in own.items():
            np.testing.assert_allclose(gradient[key], array, rtol=0, atol=1e-12 * largest, err_msg=key)


def test_one_document_per_sample_has_the_bits_of_none(small_blocks):
    ids = np.arange(LENGTH, dtype=np.uint8)[None].repeat(len(TOKENS), axis=0)
    for name, method in [("gpt2", "full"), ("llama", "blockwise")]:
        model = model_of(name, method)
        loss, gradient = loss_and_gradient(model, TOKENS, TARGETS, ids)
        own_loss, own = loss_and_gradient(model, TOKENS, TARGETS)
        assert loss == own_loss
        own.pop("wpe.weight", None)  # its gradient adds the same rows in another order
        assert all(np.array_equal(gradient[key], own[key]) for key in own)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_changed_token_moves_its_document_alone(name, method, small_blocks):
    """No logit before the token or outside of its document moves by a bit, and every other one of its document does.

    A Mixtral's experts multiply other rows then, whose products may be rounded in another way.
    """
    model = model_of(name, method)
    rounding = 1e-12 if name == "mixtral" else 0
    with packed(IDS):
        before = model(TOKENS).data
        for sample, tokens in documents():
            place = int(RANDOM.integers(tokens.start, tokens.stop))
            changed = TOKENS.copy()
            changed[sample, place] = (changed[sample, place] + 1) % VOCAB
            moved = (np.abs(model(changed).data - before) > rounding).any(axis=-1)
            expected = np.zeros_like(moved)
            expected[sample, place : tokens.stop] = True
            assert np.array_equal(moved, expected)


def test_dropout_in_documents_drops_the_same_probabilities():
    """With masks of the whole matrix, a document's part of them is its own."""
    heads, size = 2, 4
    qkv = RANDOM.standard_normal((len(TOKENS), LENGTH, 3 * heads * size))
    keep = RANDOM.random((len(TOKENS), heads, LENGTH, LENGTH)) < 0.7
    with packed(IDS):
        y = causal_attention(Tensor(qkv), heads, keep=keep, probability=0.3).data
    for i, tokens in documents():
        alone = causal_attention(
            Tensor(qkv[[i], tokens]), heads, keep=keep[[i], :, tokens, tokens], probability=0.3
        ).data
        np.testing.assert_allclose(y[[i], tokens], alone, rtol=0, atol=1e-14)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def operations(qkv, heads, ids) -> int:
    """The operations of attention in blocks, forward and backward."""
    counts: list[int] = []
    with flop_counter(counts.append), packed(ids):
        y = causal_attention(Tensor(qkv, requires_grad=True), heads, method="blockwise")
        y.backward(np.ones(y.shape))
    return sum(counts)


def test_blocks_compute_nothing_across_a_boundary(small_blocks):
    qkv = RANDOM.standard_normal((len(TOKENS), LENGTH, 24))
    alone = sum(operations(qkv[[i], tokens], 2, None) for i, tokens in documents())
    assert operations(qkv, 2, IDS) == alone < operations(qkv, 2, None)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[0, 1, 3]], r"3 at \[0, 2\]"),
        ([[0, 1], [1, 2]], r"1 at \[1, 0\]"),
        ([[0, 0, -1]], r"-1 at \[0, 2\]"),
        ([[0, 2]], r"2 at \[0, 1\]"),
        ([0, 1, 2], r"\(3,\)"),
        ([[0.0, 1.0]], "float64"),
    ],
)
def test_ids_that_are_no_documents_are_refused(ids, says):
    with pytest.raises(UsageError, match=says):
        packed(np.array(ids))


@pytest.mark.parametrize("part", [np.s_[:1], np.s_[:, :5]])
def test_ids_of_other_samples_are_refused(part):
    with packed(IDS[part]), pytest.raises(UsageError):
        model_of("gpt2")(TOKENS)


def test_a_checkpoint_without_documents_has_none_in_backward():
    """What a block saw in forward counts, and not where backward runs."""
    qkv = Tensor(RANDOM.standard_normal((4, LENGTH, 24)), requires_grad=True)
    gradients = []
    for block in (nullcontext(), packed(IDS)):
        qkv.grad = None
        y = checkpoint(lambda x: causal_attention(x, 2), qkv)
        with block:
            y.backward(np.ones(y.shape))
        gradients.append(qkv.grad)
    assert np.array_equal(*gradients)
