"""Claims about the tensor-parallel layers: put together, the ranks' outputs and gradients are the serial layer's, with
and without sequence parallelism.
"""

import numpy as np
import pytest
from refusals import refused
from tensor_cases import close, linear_of, split_along
from training import joined

import minipar as mp
from minipar.autograd import Tensor, gelu
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.more.llama import Inside
from minipar.nn import Embedding, Linear
from minipar.parallel.placement import Partial, Placement, Replicate, Shard
from minipar.parallel.tensor.layers import Border, ColumnLinear, RowLinear
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import TensorParallel
from minipar.parallel.tensor.user_layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

RANDOM = np.random.Generator(np.random.Philox(41))
B, T, H = 2, 24, 6  # 24 tokens: every size divides them
X = RANDOM.standard_normal((B, T, H))
G = RANDOM.standard_normal((B, T, H))  # the gradient that comes back
W1, B1 = RANDOM.standard_normal((H, 48)), RANDOM.standard_normal(48)
W2, B2 = RANDOM.standard_normal((48, H)), RANDOM.standard_normal(H)


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


def parallel_pair(comm, sequence, reduction):
    """A rank's outputs and gradients, made whole where they are parts."""
    group = TensorGroup(comm, reduction)
    first, second = linear_of(W1, B1), linear_of(W2, B2)
    for parameter, dim in ((first.weight, 1), (first.bias, 0), (second.weight, 0)):
        split_along(parameter, group, dim)
    of_tp = Partial(comm.rank, comm.size) if sequence else Replicate()
    second.bias.placement = Placement("bias", second.bias.shape, of_tp)
    border = Border(group, sequence)
    first, second = ColumnLinear(first, border), RowLinear(second, border)
    own = (lambda a: np.ascontiguousarray(group.part(a, 1))) if sequence else (lambda a: a)
    whole = (lambda a: group.gather(a, 1)) if sequence else (lambda a: a)
    x = Tensor(own(X), requires_grad=True)
    y = second(gelu(first(x)))
    gradients = backward(y, own(G), x, named(first, second))
    TensorParallel(group).sum_partial([second.bias])
    result = {"x": whole(gradients["x"])}
    for name, parameter in named(first, second).items():
        result[name] = joined(comm, parameter, gradients[name])
    return whole(y.data), result


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("size", "reduction"), [(1, "ring"), (2, "ring"), (3, "ordered"), (8, "ring")])
def test_column_then_row_is_the_serial_pair(size, reduction, sequence):
    y, gradients = serial_pair()
    for parallel_y, parallel in run_local(size, parallel_pair, sequence, reduction):
        assert close(parallel_y, y)
        assert [name for name in gradients if not close(parallel[name], gradients[name])] == []


def test_ordered_sums_add_the_ranks_from_left_to_right():
    """To the bit, which a ring's are not. What is summed does not change."""
    arrays = RANDOM.standard_normal((3, 2, 9, 5))
    total = arrays[0] + arrays[1] + arrays[2]

    def rank(comm):
        group, x = TensorGroup(comm, "ordered"), arrays[comm.rank].copy()
        assert np.array_equal(group.sum(x), total)
        assert np.array_equal(group.sum_part(x, 1), group.part(total, 1))
        assert np.array_equal(x, arrays[comm.rank])

    run_local(3, rank)


def test_layers_inside_of_the_border_send_nothing():
    """Their blocks enter and leave once for several of them, so each computes with its own rank's part alone."""

    def rank(comm):
        inside = Inside(TensorGroup(comm))
        x = Tensor(X, requires_grad=True)
        y = RowLinear(linear_of(W2, B2), inside)(ColumnLinear(linear_of(W1, B1), inside)(x))
        y.backward(G)
        assert close(y.data, (X @ W1 + B1) @ W2 + B2) and close(x.grad, G @ W2.T @ W1.T)
        return comm.traffic.bytes()

    assert run_local(2, rank) == [0, 0]


@pytest.mark.parametrize(("size", "groups", "transposed"), [(2, 1, False), (3, 2, True), (2, 3, True), (3, 3, False)])
def test_weight_and_bias_are_split_group_by_group(size, groups, transposed):
    """A rank's columns are those of its part of each group, of the weight and of the bias alike."""
    whole = Linear(H, 36, name="up", dtype="float64", transposed=transposed)
    whole.bias.data[...] = B1[:36]
    y = whole(X)
    gradient = RANDOM.standard_normal(y.shape)
    y.backward(gradient)

    def rank(comm):
        columns = Shard(comm.rank, size, 2, 36, groups)
        layer = ColumnParallelLinear(H, 36, comm, name="up", groups=groups, dtype="float64", transposed=transposed)
        layer.bias.data[...] = layer.bias.placement.tp.part(whole.bias.data)
        part = layer(X)
        assert close(part.data, columns.part(y.data))
        part.backward(columns.part(gradient))
        for own, serial in ((layer.weight, whole.weight), (layer.bias, whole.bias)):
            assert close(joined(comm, own, own.data), serial.data)
            assert close(joined(comm, own, own.grad), serial.grad)

    run_local(size, rank)


LAYERS = {
    "column": (ColumnParallelLinear, Linear, (H, 36)),
    "row": (RowParallelLinear, Linear, (36, H)),
    "vocabulary": (VocabParallelEmbedding, Embedding, (13, H)),
}
OPTIONS = {"seed": 3, "dtype": "float64", "std": 0.5}


@pytest.mark.parametrize("options", [{}, OPTIONS, {**OPTIONS, "bias": False, "transposed": True}])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_users_layers_start_from_the_serial_layers_values(kind, options):
    """Also with no other argument than sizes and name: the same seed, scale and dtype, and a bias of zeros."""
    parallel, serial, sizes = LAYERS[kind]
    if kind == "vocabulary":
        options = {name: value for name, value in options.items() if name in OPTIONS}
    expected = serial(*sizes, name="a", **options)

    def rank(comm):
        layer = parallel(*sizes, comm, name="a", **options)
        for own, whole in zip(layer.parameters(), expected.parameters(), strict=True):
            values = own.data if own.placement is None else joined(comm, own, own.data)
            assert own.dtype == whole.dtype and values.tobytes() == whole.data.tobytes()

    run_local(3, rank)


@pytest.mark.parametrize(("kind", "shape"), [("column", (H, 12)), ("row", (12, H)), ("vocabulary", (5, H))])
def test_a_rank_holds_a_third_of_a_users_weight(kind, shape):
    """The third is rounded up: 13 rows of a vocabulary are padded to 15."""
    parallel, _, sizes = LAYERS[kind]
    assert run_local(3, lambda comm: parallel(*sizes, comm, name="a").weight.shape) == [shape] * 3


OVER_COLUMNS = {
    "softmax": lambda y: y.softmax(),
    "log_softmax": lambda y: y.log_softmax(dim=-1),
    "sum": lambda y: y.sum(),
    "sum of the last": lambda y: y.sum(-1),
    "mean": lambda y: y.mean(),
    "mean of both": lambda y: y.mean(dim=(0, 1)),
    "max": lambda y: y.max(axis=1),
    "a slice": lambda y: y[:, :2],
    "a column": lambda y: y[..., 0],
    "loss": lambda y: mp.cross_entropy_sum(y, np.array([0, 1])),
}


@pytest.mark.parametrize("name", OVER_COLUMNS)
def test_what_needs_all_columns_is_refused_of_a_ranks_own(name):
    x = np.arange(8.0).reshape(2, 4)

    def rank(comm):
        up = mp.ColumnParallelLinear(4, 6, comm, name="up", dtype="float64")
        y = up(x)
        whole = (mp.gelu(y) * y)[0].shape, y[1].shape, y[:, :].shape, y.sum(0).shape, y.max(axis=0).shape
        assert whole == ((6 // comm.size,),) * 2 + ((2, 6 // comm.size),) + ((6 // comm.size,),) * 2
        y.sum(0)[None].backward(np.ones((1, 6 // comm.size)))
        assert up.weight.grad.any()
        if comm.size == 1:
            OVER_COLUMNS[name](y)  # these are all
        else:
            refused(UsageError, "3", by=lambda: OVER_COLUMNS[name](y))

    run_local(1, rank)
    run_local(2, rank)
