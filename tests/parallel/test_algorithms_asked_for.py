"""Claims about the order of sums: a strategy asks for the algorithm that it was given, and adds scalars in order."""

import numpy as np
import pytest
from training import MLP, Proxy

import minipar as mp
from minipar.autograd import Tensor
from minipar.comm import run_local, serial
from minipar.nn import SGD
from minipar.nn.moe import moe_layers
from minipar.parallel.context import AllGatherAttention, block_attention, context_parallel
from minipar.parallel.ddp import NaiveDataParallel
from minipar.parallel.expert import ExpertParallel
from minipar.parallel.parallelize import shard
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.tensor.vocabulary import vocab_parallel_cross_entropy_sum
from minipar.parallel.token_order import ContextParallel
from minipar.parallel.zero_optimizer import ZeroOptimizer

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
REDUCTIONS = ["ring", "ordered", "tree"]
X, Y = np.ones((2, 3)), np.ones((2, 1))


class Noting(Proxy):
    """A communicator that notes what is asked of it: the operation, what it adds up by, and the algorithm."""

    def __init__(self, comm):
        super().__init__(comm)
        self.asked = []

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if name not in OPERATIONS:
            return found

        def noting(*arrays, **options):
            self.asked.append((name, options.get("op", "sum"), options.get("algorithm", "any")))
            return found(*arrays, **options)

        return noting

    def taken(self):
        """Return what was asked since the last call, each once, in order."""
        taken = list(dict.fromkeys(self.asked))
        self.asked.clear()
        return taken


LOSS = ("all_reduce", "sum", "ordered")
NORM = ("all_reduce", "sum", "ordered")


@pytest.mark.parametrize("algorithm", REDUCTIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrapper_sums_gradients_in_its_order(stage, algorithm):
    """It gathers parameters in pairs, and sums loss and norm in the order of the ranks."""
    comm = Noting(serial())
    ddp = shard(MLP(), comm, stage, algorithm)
    comm.taken()
    loss = ddp.loss(X, Y)
    gather = ("all_gather", "sum", "pairwise")
    assert comm.taken() == ([gather, LOSS] if stage == 3 else [LOSS])
    loss.backward()
    assert comm.taken() == [("all_reduce" if stage == 0 else "reduce_scatter", "sum", algorithm)]
    ddp.clip_grad_norm(1.0)
    assert comm.taken() == ([NORM] if stage > 0 else [])
    SGD(ddp.parameters(), lr=0.1).step()
    assert comm.taken() == ([gather] if stage in (1, 2) else [])


@pytest.mark.parametrize("algorithm", REDUCTIONS)
def test_zero_optimizer_gathers_in_pairs(algorithm):
    comm = Noting(serial())
    model = MLP()
    optimizer = ZeroOptimizer(model.parameters(), SGD, comm, algorithm, lr=0.1)
    model.loss(X, Y).backward()
    optimizer.step()
    assert comm.taken() == [("reduce_scatter", "sum", algorithm), ("all_gather", "sum", "pairwise")]


def test_a_rank_of_zero_optimizer_sends_its_chunk_to_every_other():
    """Two of the four ranks have seven of the 26 elements, and two have six."""

    def rank(comm):
        model = MLP()
        optimizer = ZeroOptimizer(model.parameters(), SGD, comm, lr=0.1)
        (model.loss(X + comm.rank, Y) / 4).backward()
        optimizer.step()
        return comm.traffic.bytes("all_gather")

    assert run_local(4, rank) == [8 * 3 * chunk for chunk in (7, 7, 6, 6)]


@pytest.mark.parametrize("algorithm", REDUCTIONS)
def test_the_plainest_form_sums_each_gradient_in_its_order(algorithm):
    comm = Noting(serial())
    loss = NaiveDataParallel(MLP(), comm, algorithm).loss(X, Y)
    assert comm.taken() == [LOSS]
    loss.backward()
    assert comm.asked == [("all_reduce", "sum", algorithm)] * 4


@pytest.mark.parametrize(("reduction", "gather"), [("ring", "ring"), ("ordered", "pairwise"), ("tree", "pairwise")])
def test_a_tensor_group_gathers_by_the_order_of_its_sums(reduction, gather):
    comm = Noting(serial())
    group = TensorGroup(comm, reduction)
    x = np.arange(12.0).reshape(2, 3, 2)
    assert np.array_equal(group.sum(x), x) and comm.taken() == [("all_reduce", "sum", reduction)]
    assert np.array_equal(group.sum_part(x, 1), x) and comm.taken() == [("reduce_scatter", "sum", reduction)]
    assert np.array_equal(group.gather(x, 1), x) and comm.taken() == [("all_gather", "sum", gather)]
    logits = Tensor(np.zeros((1, 3, 4)), requires_grad=True)
    vocab_parallel_cross_entropy_sum(logits, np.zeros((1, 3), int), group).backward()
    assert comm.taken() == [("all_reduce", "max", reduction), ("all_reduce", "sum", reduction)]


def test_a_loss_over_a_communicator_sums_in_a_ring():
    comm = Noting(serial())
    vocab_parallel_cross_entropy_sum(Tensor(np.zeros((1, 3, 4))), np.zeros((1, 3), int), comm)
    assert comm.taken() == [("all_reduce", "max", "ring"), ("all_reduce", "sum", "ring")]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_sum_takes_arrays_of_any_layout(order):
    """A gradient may be the transpose of another array."""

    def rank(comm):
        group = TensorGroup(comm)
        x = np.array(np.arange(12.0).reshape(3, 4) + comm.rank, order=order)
        return group.sum(x), group.gather(x, 0), x

    inputs = [np.arange(12.0).reshape(3, 4) + rank for rank in range(2)]
    for r, (total, gathered, x) in enumerate(run_local(2, rank)):
        assert np.array_equal(total, inputs[0] + inputs[1]) and np.array_equal(x, inputs[r])
        assert np.array_equal(gathered, np.concatenate(inputs))


@pytest.mark.parametrize(("reduction", "gather"), [("ring", "ring"), ("ordered", "pairwise")])
def test_attention_gathers_blocks_by_the_order_of_its_sums(reduction, gather):
    comm = Noting(serial())
    method = AllGatherAttention(ContextParallel(comm), reduction)
    qkv = Tensor(np.ones((1, 4, 6)), requires_grad=True)
    y = block_attention(method, qkv, 2)
    assert comm.taken() == [("all_gather", "sum", gather)]
    y.backward(np.ones(y.shape))
    assert comm.taken() == [("all_gather", "sum", gather), ("reduce_scatter", "sum", reduction)]


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}


def mixtral():
    return mp.Mixtral(mp.MixtralConfig(vocab_size=17, hidden_size=16, intermediate_size=12, **SIZES))


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_loads_of_experts_are_summed_in_the_order_of_the_ranks(axis):
    def rank(comm):
        model = mixtral()
        over = Noting(comm)
        if axis == "cp":
            context_parallel(model, over)
        else:
            mesh = mp.DeviceMesh(comm, tp=2, etp=1)
            tensor_parallel(model, over, sequence=True, experts=mesh.etp)
        over.taken()
        for moe in moe_layers(model):
            (add,) = moe.load_sums
            total = add(np.array([1.0 + comm.rank]))
        return total.tolist(), over.taken()

    assert run_local(2, rank) == [([3.0], [("all_reduce", "sum", "ordered")])] * 2


def test_a_dropout_mask_is_refused_by_its_probability():
    method = AllGatherAttention(ContextParallel(serial()))
    qkv = Tensor(np.ones((1, 4, 6)))
    for options, shown in (({"probability": 0.25}, "0.25"), ({}, "0.0")):
        with pytest.raises(mp.UsageError, match=f"dropout = {shown}"):
            block_attention(method, qkv, 2, keep=np.ones((1, 2, 4, 4)), **options)


@pytest.mark.parametrize("order", ["C", "F"])
def test_experts_take_rows_of_any_layout(order):
    """On one rank they compute what the serial layer does."""
    model = mixtral()
    (moe,) = moe_layers(model)
    counts = np.array([2, 0, 1, 3])
    rows = np.array(np.random.Generator(np.random.Philox(3)).standard_normal((6, 16)), np.float32, order=order)
    dy = np.asarray(rows[::-1], order=order)
    results = []
    for run in (type(moe).run_experts, ExpertParallel(model, serial(), serial()).run):
        xs = Tensor(rows, requires_grad=True)
        y = run(moe, xs, counts)
        y.backward(dy)
        results.append((y.data, xs.grad))
    for serial_array, array in zip(*results, strict=True):
        np.testing.assert_allclose(array, serial_array, rtol=1e-5)
