"""Claims about the tokens of ranks that share a sequence: which each has, what it sees, and what is refused."""

import numpy as np
import pytest
from training import OneOf

from minipar.autograd import Tensor, packed
from minipar.errors import UsageError
from minipar.parallel.token_order import ContextParallel, check_choice, check_length, visible
from minipar.parallel.ulysses import UlyssesAttention, check_heads, columns_of_ranks


class Alike(OneOf):
    """One of ranks that all have the same arrays."""

    def all_to_all(self, x):
        """Return what this rank gets from all of them."""
        return np.concatenate([x[self.rank]] * self.size).reshape(-1)


def shown(pairs):
    return [((rows.start, rows.stop), (columns.start, columns.stop)) for rows, columns in pairs]


@pytest.mark.parametrize(
    ("order", "seen"),
    [
        ("contiguous", {0: [((0, 6), (0, 6))], 1: [((0, 6), (0, 6))], 2: []}),
        ("zigzag", {0: [((0, 6), (0, 3))], 1: [((0, 6), (0, 6))], 2: [((3, 6), (0, 6))]}),
    ],
)
def test_a_middle_rank_sees_these_tokens_of_each(order, seen):
    assert {source: shown(visible(order, 1, source, 6)) for source in range(3)} == seen
    context = ContextParallel(OneOf(1, 3), order)
    for source, pairs in seen.items():
        found = context.visible(source, 2, 6)
        assert [(samples.start, samples.stop) for samples, *_ in found] == [(0, 2)] * len(pairs)
        assert shown(pair for _, *pair in found) == pairs


@pytest.mark.parametrize(
    ("order", "positions"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ],
)
def test_each_rank_has_these_positions(order, positions):
    context = ContextParallel(OneOf(1, 3), order)
    assert context.positions(12).tolist() == positions
    x = np.arange(24).reshape(2, 12)
    assert context.part(x).tolist() == x[:, positions[1]].tolist()
    assert context.part(x.T, dim=0).tolist() == x.T[positions[1]].tolist()
    assert [context.source(step) for step in range(-1, 3)] == [2, 1, 0, 2]


def test_a_sample_of_documents_is_seen_document_by_document():
    """Rank 1 of 2 has the middle of each sample. The first one is a document of 8 tokens, the second has 3 and 5."""
    context = ContextParallel(OneOf(1, 2), "zigzag")
    with packed(np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])):
        own, other = context.visible(1, 2, 4), context.visible(0, 2, 4)
    as_ranges = [[tuple((each.start, each.stop) for each in one) for one in seen] for seen in (own, other)]
    assert as_ranges == [
        [((0, 1), (0, 4), (0, 4)), ((1, 2), (0, 1), (0, 1)), ((1, 2), (1, 4), (1, 4))],
        [((0, 1), (0, 4), (0, 2)), ((1, 2), (0, 1), (0, 2))],
    ]


def test_one_rank_has_all_tokens_in_order():
    context = ContextParallel(OneOf(0, 1), "zigzag")
    assert context.order == "contiguous" and context.positions(5).tolist() == [[0, 1, 2, 3, 4]]


def line_of(call, *arguments):
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_length_or_a_word_that_does_not_fit_is_this_line():
    assert line_of(check_length, 6, 2, "zigzag") == (
        "seq-len/(2*cp) = 6/4 is not a whole number: zigzag has equal chunks"
    )
    assert line_of(check_length, 7, 2, "documents") == (
        "seq-len/cp = 7/2 is not a whole number: documents has equal chunks"
    )
    assert line_of(check_choice, "method", "rings", ("ring", "ulysses")) == (
        "context parallelism: method 'rings': expected ring, ulysses"
    )
    assert line_of(check_heads, 3, 2, 2) == "heads/cp = 3/2 is not a whole number: ulysses cuts each tp rank's heads"
    assert line_of(check_heads, 4, 3, 2) == (
        "kv-heads/cp = 3/2 is not a whole number: ulysses cuts each tp rank's kv-heads"
    )


def test_a_length_that_fits_is_not_refused():
    check_length(12, 2, "zigzag")
    check_length(6, 2, "contiguous")


# ---- ulysses ---------------------------------------------------------------------------------------------------------


def test_each_rank_gets_its_columns_of_q_k_and_v():
    assert columns_of_ranks(2, [4, 2, 2]).tolist() == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert columns_of_ranks(3, [6]).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_serial_attention_is_called_with_a_ranks_heads():
    """It gets all tokens of half of the heads, and the masks of these heads in memory of their own."""
    called = []

    def attention(qkv, *options):
        called.append((qkv.shape, *options))
        return Tensor(np.zeros((*qkv.shape[:2], 4)))

    ulysses = UlyssesAttention(attention, ContextParallel(Alike(1, 2), "contiguous"))
    assert ulysses(Tensor(np.zeros((1, 3, 16))), 4, 2).shape == (1, 3, 8)  # heads of two columns
    assert ulysses(Tensor(np.zeros((1, 3, 24))), 4).shape == (1, 3, 8)
    masks = np.arange(4 * 36).reshape(1, 4, 6, 6)
    ulysses(Tensor(np.zeros((1, 3, 16))), 4, 2, masks, 0.25)
    *_, keep, probability = called.pop()
    assert called == [((1, 6, 8), 2, 1, None, 0.0), ((1, 6, 12), 2, 2, None, 0.0)]
    assert np.array_equal(keep, masks[:, 2:]) and keep.base is None and probability == 0.25
