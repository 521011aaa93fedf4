"""Claims about the tensor-parallel layers: put together, the ranks' outputs and gradients are the serial layer's, with
and without sequence parallelism, and the mistakes of the chapter's exercises do not pass.
"""

import numpy as np
import pytest
from tensor_cases import linear_of
from training import Proxy, joined

from minipar.autograd import Function, Tensor, cross_entropy_sum, embedding, gelu, linear
from minipar.comm import run_local, wire_bytes
from minipar.nn import Embedding, Parameter
from minipar.parallel.placement import Partial, Placement, Replicate, Shard
from minipar.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    column_linear,
    enter,
    leave,
    split,
    vocab_parallel_cross_entropy_sum,
)
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import TensorParallel

SIZES = [1, 2, 3, 4, 8]
RANDOM = np.random.Generator(np.random.Philox(41))
B, T, H = 2, 24, 6  # 24 tokens: every size divides them
X = RANDOM.standard_normal((B, T, H))
G = RANDOM.standard_normal((B, T, H))  # the gradient that comes back
W1, B1 = RANDOM.standard_normal((H, 48)), RANDOM.standard_normal(48)
W2, B2 = RANDOM.standard_normal((48, H)), RANDOM.standard_normal(H)


def close(a, b, bound=1e-13):
    return a.shape == b.shape and np.abs(a - b).max() <= bound * np.abs(b).max()


def split_along(weight, group, dim):
    """Leave this rank its part of a parameter."""
    split(weight, group.shard(dim, weight.shape[dim]))


def backward(y, gradient, x, parameters):
    """Gradients of x and of the parameters, by name."""
    y.backward(np.ascontiguousarray(gradient))
    return {"x": x.grad, **{name: p.grad for name, p in parameters.items()}}


# ---- column, then row ------------------------------------------------------------------------------------------------


def serial_pair():
    x, first, second = Tensor(X, requires_grad=True), linear_of(W1, B1), linear_of(W2, B2)
    y = second(gelu(first(x)))
    return y.data, backward(y, G, x, named(first, second))


def named(first, second):
    return {"first.weight": first.weight, "first.bias": first.bias} | {
        "second.weight": second.weight,
        "second.bias": second.bias,
    }


def parallel_pair(comm, sequence, reduction="ring", column=ColumnParallelLinear, row=RowParallelLinear, summed=True):
    """A rank's outputs and gradients, made whole where they are parts."""
    group = TensorGroup(comm, reduction)
    first, second = linear_of(W1, B1), linear_of(W2, B2)
    for parameter, dim in ((first.weight, 1), (first.bias, 0), (second.weight, 0)):
        split_along(parameter, group, dim)
    second.bias.placement = Placement("bias", second.bias.shape, Partial() if sequence else Replicate())
    first = column.from_serial(first, group, sequence)
    second = row.from_serial(second, group, sequence)
    own = (lambda a: np.ascontiguousarray(group.part(a, 1))) if sequence else (lambda a: a)
    whole = (lambda a: group.gather(a, 1)) if sequence else (lambda a: a)
    x = Tensor(own(X), requires_grad=True)
    y = second(gelu(first(x)))
    gradients = backward(y, own(G), x, named(first, second))
    if summed:
        TensorParallel(group).sum_partial([second.bias])
    result = {"x": whole(gradients["x"])}
    for name, parameter in named(first, second).items():
        result[name] = joined(comm, parameter, gradients[name])
    return whole(y.data), result


def differing(size, sequence, **broken):
    """What of the parallel pair is not the serial pair's, on any rank: "y" and names of gradients."""
    y, gradients = serial_pair()
    found = set()
    for parallel_y, parallel in run_local(size, parallel_pair, sequence, **broken):
        found |= {"y"} if not close(parallel_y, y) else set()
        found |= {name for name in gradients if not close(parallel[name], gradients[name])}
    return found


@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_column_then_row_is_the_serial_pair(size, sequence, reduction):
    assert differing(size, sequence, reduction=reduction) == set()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_column_layer_alone_gives_this_ranks_columns(size, sequence):
    def rank(comm):
        group = TensorGroup(comm)
        weight, bias = Shard(comm.rank, size, dim=1, size=48).part(W1), Shard(comm.rank, size, dim=0, size=48).part(B1)
        own = np.ascontiguousarray(group.part(X, 1)) if sequence else X
        y = ColumnParallelLinear.from_serial(linear_of(weight, bias), group, sequence)(Tensor(own, requires_grad=True))
        return y.data

    whole = np.concatenate(run_local(size, rank), axis=-1)
    assert close(whole, X @ W1 + B1, 1e-14)


class BiasOnEveryRank(RowParallelLinear):
    """The exercise's first mistake: the sum counts the bias t times."""

    def forward(self, x):
        return leave(linear(x, self.weight, self.bias), self.group, self.sequence)


class ForgetsTheSumInBackward(ColumnParallelLinear):
    """The second: every output is right, and x's gradient is this rank's share of it."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_bias_on_every_rank_is_caught_in_the_output(size):
    for sequence in (False, True):
        assert "y" in differing(size, sequence, row=BiasOnEveryRank)
    assert differing(1, False, row=BiasOnEveryRank) == set()  # on one rank there is nothing to see


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_forgotten_all_reduce_shows_in_gradients_alone(size):
    assert differing(size, False, column=ForgetsTheSumInBackward) == {"x"}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_replicated_gradient_that_is_not_summed_is_caught(size):
    """Under sequence parallelism each rank's gradient of the row layer's bias is that of its tokens only."""
    assert differing(size, True, summed=False) == {"second.bias"}
    assert differing(size, False, summed=False) == set()  # without it there is nothing to sum


class GatherWithoutSum(Function):
    """An all-gather whose backward keeps this rank's part of its own share, where the sum over ranks belongs."""

    def forward(self, x, group):
        self.group = group
        return group.gather(x, 1)

    def backward(self, grad):
        return self.group.part(grad, 1), None


class GathersWithoutSumming(ColumnParallelLinear):
    def forward(self, x):
        return linear(GatherWithoutSum.apply(x, self.group), self.weight, self.bias)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_forgotten_reduce_scatter_shows_in_gradients_alone(size):
    assert differing(size, True, column=GathersWithoutSumming) == {"x"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_column_product_is_enter_and_linear(size, sequence, transposed):
    """The same numbers and the same bytes; only the order in which they are waited for is another."""
    outputs = RANDOM.standard_normal((B, T, 5))

    def rank(comm, fused, bias):
        group = TensorGroup(comm)
        random = np.random.Generator(np.random.Philox(50 + comm.rank))
        w = Tensor(random.standard_normal((5, H) if transposed else (H, 5)), requires_grad=True)
        b = Tensor(random.standard_normal(5), requires_grad=True) if bias else None
        x = Tensor(np.ascontiguousarray(group.part(X, 1)) if sequence else X, requires_grad=True)
        if fused:
            y = column_linear(x, w, b, group, sequence, transposed)
        else:
            y = linear(enter(x, group, sequence), w, b, transposed)
        y.backward(outputs * (comm.rank + 1))
        leaves = [x, w, b] if bias else [x, w]
        return [y.data.tobytes(), *(leaf.grad.tobytes() for leaf in leaves)], comm.traffic.counts

    for bias in (False, True):
        assert run_local(size, rank, True, bias) == run_local(size, rank, False, bias)


def test_the_weights_gradient_overlaps_the_inputs_sum():
    """What the fused product is for: between the start of the sum and its end."""
    events = []

    class Watched(TensorGroup):
        def start_sum(self, x):
            wait = super().start_sum(x)
            events.append("sum starts")
            return lambda: (events.append("sum ends"), wait())[1]

    def rank(comm):
        x = Tensor(X, requires_grad=True)
        w = Parameter(W1.copy())
        w.register_post_accumulate_grad_hook(lambda leaf: events.append("weight"))
        # x is made by an operation: a gradient that goes on, as in a model, waits as late as it can.
        column_linear(x * 1.0, w, None, Watched(comm), False).backward(np.ones((B, T, 48)))

    run_local(1, rank)
    assert events == ["sum starts", "weight", "sum ends"]


# ---- the vocabulary --------------------------------------------------------------------------------------------------

VOCABULARIES = [13, 24, 3, 1]  # 3 and 1: ranks of 4 and 8 that hold nothing but padding


def tokens_and_targets(vocab):
    random = np.random.Generator(np.random.Philox(vocab))
    tokens, targets = random.integers(0, vocab, (2, B, T))
    targets[0, 3:5] = targets[1, -1] = -100
    return tokens, targets


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
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
        y = VocabParallelEmbedding.from_serial(table_part, group, sequence)(tokens)
        y.backward(np.ascontiguousarray(group.part(G, 1)) if sequence else G)
        part = group.part(expected.data, 1) if sequence else expected.data
        assert np.array_equal(y.data, part)
        rows = max(0, min(weight.shape[0], vocab - comm.rank * weight.shape[0]))
        assert not weight.grad[rows:].any() and not weight.data[rows:].any(), "padding moves"
        return joined(comm, weight, weight.grad)

    for gradient in run_local(size, rank):
        assert close(gradient, serial.grad, 1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_positions_are_looked_up_for_this_ranks_tokens_only(size):
    table = RANDOM.standard_normal((T, H))

    def rank(comm):
        group, serial = TensorGroup(comm), Embedding(T, H, name="wpe", dtype="float64")
        weight = serial.weight = Parameter(table.copy())
        whole = SequenceEmbedding.from_serial(serial, group, False)(np.arange(T))
        assert np.array_equal(whole.data, table)
        y = SequenceEmbedding.from_serial(serial, group, True)(np.arange(T))
        assert np.array_equal(y.data, group.part(table, 0))
        y.backward(np.ones(y.shape))
        weight.placement = Placement("weight", weight.shape, Partial())
        TensorParallel(group).sum_partial([weight])
        return weight.grad

    serial = Parameter(table.copy())
    embedding(serial, np.arange(T)).backward(np.ones((T, H)))
    for gradient in run_local(size, rank):
        assert np.array_equal(gradient, serial.grad)


def head_and_loss(comm, vocab, sequence, reduction="ring", make_group=TensorGroup):
    """A rank's logits, loss, gradients made whole, and the bytes that the loss alone sent."""
    _, targets = tokens_and_targets(vocab)
    group = make_group(comm, reduction)
    weight = Parameter(np.random.Generator(np.random.Philox(2)).standard_normal((vocab, H)))
    split_along(weight, group, 0)
    x = Tensor(np.ascontiguousarray(group.part(X, 1)) if sequence else X, requires_grad=True)
    logits = VocabParallelHead(vocab, group, sequence)(x, weight)
    comm.traffic.reset()
    loss = vocab_parallel_cross_entropy_sum(logits, targets, group)
    sent = {key: tuple(count) for key, count in comm.traffic.counts.items()}
    (loss * 0.5).backward()
    dx = group.gather(x.grad, 1) if sequence else x.grad
    return logits.data, loss.item(), dx, joined(comm, weight, weight.grad), sent


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
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


@pytest.mark.parametrize("reduction", ["ring", "ordered"])
@pytest.mark.parametrize("size", SIZES)
def test_the_loss_sends_two_small_all_reduces_and_no_logits(size, reduction):
    n = B * T
    for rank, result in enumerate(run_local(size, head_and_loss, 13, False, reduction)):
        sent = result[-1]
        expected = sum(wire_bytes("all_reduce", reduction, k * n, 8, size, rank) for k in (1, 2))
        messages = 0 if size == 1 else 2 * 2 * (size - 1)
        assert sent == ({("all_reduce", "world"): (messages, expected)} if size > 1 else {})
        assert expected == 2 * 3 * n * 8 * (size - 1) // size


def loss_of(rows, targets, size, comm_of=lambda comm: comm):
    """The split loss of these logits (N, V), as ranks that hold V/size columns each find it."""

    def rank(comm):
        group = TensorGroup(comm_of(comm))
        part = np.ascontiguousarray(group.part(rows, 1))
        logits = Tensor(part, requires_grad=True)
        loss = vocab_parallel_cross_entropy_sum(logits, targets, group)
        loss.backward()
        return loss.item(), logits.grad

    results = run_local(size, rank)
    return results[0][0], np.concatenate([result[1] for result in results], axis=1)


@pytest.mark.parametrize("size", SIZES)
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


class LocalMaximum(Proxy):
    """A communicator that forgets to agree on the maxima."""

    def all_reduce(self, x, op="sum", **options):
        return x if op == "max" else self.comm.all_reduce(x, op=op, **options)


class NoTarget(LocalMaximum):
    """... or sums the exponentials only, so that a rank without the target counts it as a logit of 0."""

    def all_reduce(self, x, op="sum", **options):
        if op == "sum":
            self.comm.all_reduce(x[0], op=op, **options)
            return x
        return self.comm.all_reduce(x, op=op, **options)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("broken", [LocalMaximum, NoTarget])
def test_a_softmax_without_global_maximum_or_target_is_caught(broken, size):
    rows, targets = RANDOM.standard_normal((5, 24)), np.array([0, 7, 12, 23, -100])
    logits = Tensor(rows, requires_grad=True)
    expected = cross_entropy_sum(logits, targets)
    expected.backward()
    loss, gradient = loss_of(rows, targets, size)
    assert loss == pytest.approx(expected.item(), rel=1e-13) and close(gradient, logits.grad)
    loss, gradient = loss_of(rows, targets, size, broken)
    assert loss != pytest.approx(expected.item(), rel=1e-3)


def test_the_comparisons_here_can_fail():
    class Off(Function):
        def forward(self, x):
            return x * (1 + 1e-12)

        def backward(self, grad):
            return grad

    y = Off.apply(Tensor(X)).data
    assert not close(y, X) and close(X.copy(), X)
