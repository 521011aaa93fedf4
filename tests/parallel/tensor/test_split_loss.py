"""Claims about dtypes and padding over ranks: in which dtypes arrays travel, and which logits padding has."""

import numpy as np
import pytest
from training import OneOf, Proxy

from minipar.autograd import Tensor, cross_entropy_sum
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.parallel.context import AllGatherAttention, RingAttention, block_attention
from minipar.parallel.tensor.layers import Border
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.vocabulary import vocab_parallel_cross_entropy_sum, vocab_parallel_head
from minipar.parallel.token_order import ContextParallel

RANDOM = np.random.Generator(np.random.Philox(31))
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "isend")


class Noting(Proxy):
    """A communicator that notes each operation, and the dtype of what travels."""

    def __init__(self, comm):
        super().__init__(comm)
        self.sent = []

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if name not in OPERATIONS:
            return found

        def noting(x, *arguments, **options):
            self.sent.append((name, x.dtype.name))
            return found(x, *arguments, **options)

        return noting


@pytest.mark.parametrize(
    ("options", "x", "summed", "gathered"),
    [
        ({}, "float16", "float32", "float16"),
        ({}, "float64", "float64", "float64"),
        ({"reduce_dtype": "float16"}, "float32", "float16", "float32"),
        ({"dtype": "float16"}, "float32", "float32", "float16"),
        ({"dtype": "float64", "reduce_dtype": "float64"}, "float32", "float64", "float64"),
    ],
)
def test_activations_travel_in_these_dtypes(options, x, summed, gathered):
    """Results have the dtype of the activation, in whichever dtype it travels."""
    comm = Noting(serial())
    group = TensorGroup(comm, **options)
    array = np.arange(6.0).reshape(1, 2, 3).astype(x)
    for result in (group.sum(array), group.sum_part(array, 1), group.gather(array, 1)):
        assert result.dtype == x and np.array_equal(result, array)
    assert comm.sent == [("all_reduce", summed), ("reduce_scatter", summed), ("all_gather", gathered)]


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "blocks", "gradients"),
    [
        (None, None, "float64", "float64"),
        ("float32", None, "float32", "float64"),
        (None, "float32", "float64", "float32"),
        ("float16", "float32", "float16", "float32"),
    ],
)
def test_blocks_of_attention_travel_in_these_dtypes(dtype, reduce_dtype, blocks, gradients):
    """Keys and values travel in the model's dtype, the sums of their gradients in that of sums."""

    def rank(comm, kind):
        over = Noting(comm)
        context = ContextParallel(over)
        options = {"dtype": dtype, "reduce_dtype": reduce_dtype}
        qkv = Tensor(np.ones((1, 4, 6)), requires_grad=True)
        y = block_attention(kind(context, **options), qkv, 1)
        y.backward(np.ones(y.shape))
        assert y.dtype == qkv.grad.dtype == np.float64
        return over.sent

    ring = [("isend", blocks), ("isend", blocks), ("isend", gradients), ("isend", gradients)]
    assert run_local(2, rank, RingAttention) == [ring] * 2
    gather = [("all_gather", blocks), ("all_gather", blocks), ("reduce_scatter", gradients)]
    assert run_local(2, rank, AllGatherAttention) == [gather] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("rank", "vocab", "padding"), [(0, 3, 0), (0, 5, 0), (1, 6, 0), (1, 5, 1), (1, 4, 2), (1, 3, 3), (2, 4, 3)]
)
def test_logits_of_padding_are_minus_infinity(rank, vocab, padding, dtype):
    """A rank of three has three rows; as many at its end as are beyond the vocabulary are padding."""
    x = RANDOM.standard_normal((1, 2, 4)).astype(dtype)
    weight = RANDOM.standard_normal((3, 4)).astype(dtype)
    border = Border(TensorGroup(OneOf(rank, 3)))
    logits = vocab_parallel_head(Tensor(x), Tensor(weight), vocab, border).data
    assert logits.dtype == dtype and logits.shape == (1, 2, 3)
    np.testing.assert_allclose(logits[..., : 3 - padding], (x @ weight.T)[..., : 3 - padding], rtol=1e-5)
    assert (logits[..., 3 - padding :] == -np.inf).all()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_loss_and_its_gradient_are_those_of_whole_logits(dtype, flat):
    logits = (RANDOM.standard_normal((2, 3, 5)) * 3).astype(dtype)
    targets = np.array([[0, 4, -100], [2, 2, 1]])
    whole = Tensor(logits, requires_grad=True)
    expected = cross_entropy_sum(whole, targets)
    expected.backward()
    comm = Noting(serial())
    own = Tensor(logits, requires_grad=True)
    loss = vocab_parallel_cross_entropy_sum(own, targets.reshape(-1) if flat else targets, comm)
    loss.backward()
    assert loss.dtype == own.grad.dtype == dtype
    assert comm.sent == [("all_reduce", dtype)] * 2
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-6)
    np.testing.assert_allclose(own.grad, whole.grad, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_targets_are_below_the_columns_of_all_ranks(ranks):
    def loss(comm, target, **options):
        logits = Tensor(np.zeros((1, 1, 3)))
        return vocab_parallel_cross_entropy_sum(logits, np.array([[target]]), comm, **options).item()

    last = 3 * ranks - 1
    assert run_local(ranks, loss, last) == [pytest.approx(np.log(3 * ranks))] * ranks
    with pytest.raises(UsageError, match=str(last + 1)):
        run_local(ranks, loss, last + 1)
    with pytest.raises(UsageError, match=str(last)):
        run_local(ranks, lambda comm: loss(comm, last, vocab_size=last))
