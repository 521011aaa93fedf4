"""Claims about a vocabulary and positions that ranks share: embeddings, the head and its loss are the serial ones."""

import numpy as np
import pytest
from tensor_cases import close, split_along
from training import joined

from minipar.autograd import Tensor, cross_entropy_sum, embedding, linear
from minipar.comm import run_local, wire_bytes
from minipar.nn import Embedding, Parameter
from minipar.parallel.placement import Partial, Placement
from minipar.parallel.tensor.layers import Border, PositionEmbedding, VocabEmbedding
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import TensorParallel
from minipar.parallel.tensor.vocabulary import vocab_parallel_cross_entropy_sum, vocab_parallel_head

RANDOM = np.random.Generator(np.random.Philox(43))
B, T, H = 2, 24, 6  # 24 tokens: every size divides them
X = RANDOM.standard_normal((B, T, H))
G = RANDOM.standard_normal((B, T, H))  # the gradient that comes back


def tokens_and_targets(vocab):
    random = np.random.Generator(np.random.Philox(vocab))
    tokens, targets = random.integers(0, vocab, (2, B, T))
    targets[0, 3:5] = targets[1, -1] = -100
    return tokens, targets


@pytest.mark.parametrize("vocab", [13, 24, 3, 1])  # 3 and 1: ranks that hold nothing but padding
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_split_embedding_is_the_serial_one_bit_for_bit(size, sequence, vocab):
    tokens, _ = tokens_and_targets(vocab)
    table = np.random.Generator(np.random.Philox(1)).standard_normal((vocab, H))
    serial = Parameter(table.copy())
    expected = embedding(serial, tokens)
    expected.backward(G)

    def rank(comm):
        group = TensorGroup(comm)
        table_part = Embedding(vocab, H, name="table", dtype="float64")
        weight = table_part.weight
        weight.data = table.copy()
        split_along(weight, group, 0)
        y = VocabEmbedding(table_part, Border(group, sequence))(tokens)
        y.backward(np.ascontiguousarray(group.part(G, 1)) if sequence else G)
        part = group.part(expected.data, 1) if sequence else expected.data
        assert np.array_equal(y.data, part)
        rows = max(0, min(weight.shape[0], vocab - comm.rank * weight.shape[0]))
        assert not weight.grad[rows:].any() and not weight.data[rows:].any(), "padding moves"
        return joined(comm, weight, weight.grad)

    for gradient in run_local(size, rank):
        assert close(gradient, serial.grad, 1e-15)


@pytest.mark.parametrize("size", [2, 8])
def test_positions_are_looked_up_for_this_ranks_tokens_only(size):
    table = RANDOM.standard_normal((T, H))

    def rank(comm):
        group, serial = TensorGroup(comm), Embedding(T, H, name="wpe", dtype="float64")
        weight = serial.weight = Parameter(table.copy())
        whole = PositionEmbedding(serial, Border(group))(np.arange(T))
        assert np.array_equal(whole.data, table)
        y = PositionEmbedding(serial, Border(group, sequence=True))(np.arange(T))
        assert np.array_equal(y.data, group.part(table, 0))
        y.backward(np.ones(y.shape))
        weight.placement = Placement("weight", weight.shape, Partial(comm.rank, comm.size))
        TensorParallel(group).sum_partial([weight])
        return weight.grad

    serial = Parameter(table.copy())
    embedding(serial, np.arange(T)).backward(np.ones((T, H)))
    for gradient in run_local(size, rank):
        assert np.array_equal(gradient, serial.grad)


def head_and_loss(comm, vocab, sequence, reduction="ring"):
    """A rank's logits, loss, gradients made whole, and the bytes that the loss alone sent."""
    _, targets = tokens_and_targets(vocab)
    group = TensorGroup(comm, reduction)
    weight = Parameter(np.random.Generator(np.random.Philox(2)).standard_normal((vocab, H)))
    split_along(weight, group, 0)
    x = Tensor(np.ascontiguousarray(group.part(X, 1)) if sequence else X, requires_grad=True)
    logits = vocab_parallel_head(x, weight, vocab, Border(group, sequence))
    comm.traffic.reset()
    loss = vocab_parallel_cross_entropy_sum(logits, targets, group)
    sent = {key: tuple(count) for key, count in comm.traffic.counts.items() if count[0]}
    (loss * 0.5).backward()
    dx = group.gather(x.grad, 1) if sequence else x.grad
    return logits.data, loss.item(), dx, joined(comm, weight, weight.grad), sent


@pytest.mark.parametrize("vocab", [13, 24, 3, 1])  # 3 and 1: ranks that hold nothing but padding
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_split_head_and_its_loss_are_the_serial_ones(size, sequence, vocab):
    _, targets = tokens_and_targets(vocab)
    x = Tensor(X, requires_grad=True)
    weight = Parameter(np.random.Generator(np.random.Philox(2)).standard_normal((vocab, H)))
    logits = linear(x, weight, transposed=True)
    loss = cross_entropy_sum(logits, targets)
    (loss * 0.5).backward()
    results = run_local(size, head_and_loss, vocab, sequence)
    together = np.concatenate([result[0] for result in results], axis=-1)
    assert close(together[..., :vocab], logits.data) and (together[..., vocab:] == -np.inf).all()
    assert together.shape[-1] - vocab == -vocab % size
    for _, parallel_loss, dx, dweight, _ in results:
        assert parallel_loss == results[0][1] == pytest.approx(loss.item(), rel=1e-13)
        assert vocab == 1 or (close(dx, x.grad) and close(dweight, weight.grad))
        assert vocab > 1 or not (dx.any() or dweight.any())  # one token: probability 1, nothing to learn
        assert not dx[0, 3:5].any() and not dx[1, -1].any()  # ignored targets


@pytest.mark.parametrize(("size", "reduction"), [(1, "ring"), (3, "ring"), (8, "ordered")])
def test_the_loss_sends_two_small_all_reduces_and_no_logits(size, reduction):
    n = B * T
    for rank, result in enumerate(run_local(size, head_and_loss, 13, False, reduction)):
        sent = result[-1]
        expected = sum(wire_bytes("all_reduce", reduction, k * n, 8, size, rank) for k in (1, 2))
        messages = 0 if size == 1 else 2 * 2 * (size - 1)
        assert sent == ({("all_reduce", "world"): (messages, expected)} if size > 1 else {})
        assert expected == 2 * 3 * n * 8 * (size - 1) // size


def loss_of(rows, targets, size):
    """The split loss of these logits (N, V), as ranks that hold V/size columns each find it."""

    def rank(comm):
        group = TensorGroup(comm)
        part = np.ascontiguousarray(group.part(rows, 1))
        logits = Tensor(part, requires_grad=True)
        loss = vocab_parallel_cross_entropy_sum(logits, targets, group)
        loss.backward()
        return loss.item(), logits.grad

    results = run_local(size, rank)
    return results[0][0], np.concatenate([result[1] for result in results], axis=1)


@pytest.mark.parametrize("size", [2, 8])
def test_each_row_subtracts_its_maximum_over_the_vocabulary(size):
    """Far apart: rows of one another, and a row's logits on different ranks."""
    rows = np.zeros((4, 24))
    rows[0, 0] = rows[1, -1] = 5000.0
    rows[2] = -5000.0
    rows[3, :12] = -800.0
    targets = np.array([0, 23, 5, 20])
    loss, gradient = loss_of(rows, targets, size)
    assert loss == pytest.approx(np.log(24) + np.log(12), rel=1e-14) and np.isfinite(gradient).all()


def test_all_targets_ignored_is_loss_zero_and_gradient_zero():
    loss, gradient = loss_of(RANDOM.standard_normal((3, 4)), np.full(3, -100), 2)
    assert loss == 0.0 and not gradient.any()
