"""Claims about a rank's chunk and its sums: where each lies, which squares a norm adds, which batches are noted."""

import numpy as np
import pytest
from training import MLP, OneOf, TiedModel, small_gpt

from minipar.autograd import Tensor
from minipar.comm import serial
from minipar.memory import MemoryLedger
from minipar.nn import Parameter
from minipar.nn.module import Segment
from minipar.parallel import guards
from minipar.parallel.buckets import Bucket
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.groups import Group, by_size, by_unit, groups_over, number_units, segments_of
from minipar.parallel.hybrid import set_gradient_dtype
from minipar.parallel.placement import BucketSlice, Partial, Placement, Shard, bucket_slice, placement_of
from minipar.parallel.shards import Chunk, all_shards, allocate_gradient, at_backward


def bucket_of(rank, size, *sizes):
    """A bucket of parameters of these sizes, on one of so many ranks."""
    parameters = [Parameter(np.zeros(n)) for n in sizes]
    group = Group(parameters, serial(), 0)
    number_units([group])
    return Bucket(group, OneOf(rank, size))


def elements(shards):
    return [(shard.elements.start, shard.elements.stop, shard.data.tolist()) for shard in shards]


def test_a_chunk_has_a_shard_of_each_parameter_in_it():
    """Ten elements on three ranks: 4, 3, 3."""
    flat = np.arange(10.0)
    found = []
    for rank in range(3):
        bucket = bucket_of(rank, 3, 3, 4, 1, 2)
        chunk = Chunk(bucket, flat[bucket.own], np.zeros(bucket.own.stop - bucket.own.start))
        assert all(np.shares_memory(shard.grad_buffer, chunk.gradient) for shard in chunk.shards)
        found.append(elements(all_shards({bucket: chunk})))
    assert found == [
        [(0, 3, [0.0, 1.0, 2.0]), (0, 1, [3.0])],
        [(1, 4, [4.0, 5.0, 6.0])],
        [(0, 1, [7.0]), (0, 2, [8.0, 9.0])],
    ]


def test_a_rank_without_elements_has_one_empty_shard():
    buckets = [bucket_of(2, 3, 1), bucket_of(2, 3, 1, 1)]
    chunks = {bucket: Chunk(bucket, np.zeros(0), np.zeros(0)) for bucket in buckets}
    assert elements(all_shards(chunks)) == [(0, 0, [])]
    assert all_shards(chunks)[0].placement is buckets[0].parameters[0].placement


def test_the_sums_of_several_passes_add_up_in_their_order():
    """The first lies in the gradient itself; the others lie in memory of their own until they are accepted."""
    bucket = bucket_of(0, 1, 2, 1)
    gradient = np.zeros(3)
    chunk = Chunk(bucket, np.zeros(3), gradient)
    assert chunk.room_for_sum() is gradient
    gradient[:] = [1.0, 2.0, 3.0]
    assert all(shard.grad is None for shard in chunk.shards)
    chunk.accept_sums()
    ledger = MemoryLedger()
    with ledger.recording():
        second = chunk.room_for_sum()
        third = chunk.room_for_sum()
        assert ledger.held["buffers"] == 2 * 3 * 8 == ledger.total()
        second[:] = [10.0, 20.0, 30.0]
        third[:] = [100.0, 200.0, 300.0]
        chunk.accept_sums()
    assert gradient.tolist() == [111.0, 222.0, 333.0]
    assert [shard.grad.tolist() for shard in chunk.shards] == [[111.0, 222.0], [333.0]]
    chunk.accept_sums()
    assert gradient.tolist() == [111.0, 222.0, 333.0], "each is added once"


class Work:
    """A sum under way that notes when it is waited for."""

    def __init__(self, number, waited):
        self.number = number
        self.waited = waited

    def wait(self):
        self.waited.append(self.number)


@pytest.mark.parametrize(("sends", "kind", "first"), [(True, "buffers", [0, 1]), (False, "gradients", [])])
def test_a_whole_gradient_waits_for_all_sums_but_the_last(sends, kind, first):
    bucket = bucket_of(0, 1, 2, 3)
    for p in bucket.parameters:
        p.grad_dtype = "float32"
    waited = []
    works = [Work(number, waited) for number in range(3)]
    ledger = MemoryLedger()
    with ledger.recording():
        allocate_gradient(bucket, works, sends)
        assert waited == first and ledger.held[kind] == ledger.total() == 5 * 4
        assert bucket.gradient.dtype == np.float32 and bucket.gradient.size == 5
        whole = bucket.gradient
        allocate_gradient(bucket, works, sends)
    assert bucket.gradient is whole and waited == first


def test_backward_calls_at_each_tensor_of_an_output():
    calls = []
    x = Tensor(np.ones(2), requires_grad=True)
    constant = Tensor(np.ones(2))
    tokens = np.arange(2)
    both = at_backward((x, [constant, tokens, x]), lambda: calls.append("here"))
    assert type(both) is tuple and type(both[1]) is list
    assert both[1][0] is constant and both[1][1] is tokens and both[0] is not x
    (both[0] * 3.0 + both[1][2]).sum().backward()
    assert calls == ["here"] * 2 and x.grad.tolist() == [4.0, 4.0]


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_gradients_have_float32_at_least():
    for dtype, found in (("float32", "float32"), ("float64", "float64"), ("float16", "float32")):
        assert np.dtype(set_gradient_dtype(MLP(dtype=dtype), None)) == found


def test_gradients_have_the_dtype_that_is_asked_for():
    model = TiedModel()
    assert set_gradient_dtype(model, "float16") == "float16"
    assert model.weight.grad_dtype == model.leaf.grad_dtype == "float16"


def test_a_model_without_segments_is_one_that_is_last():
    model = MLP()
    (segment,) = segments_of(model)
    assert (segment.name, segment.is_last, segment.reads_in_backward) == ("model", True, True)
    assert segment.parameters == model.parameters() == by_unit(model)[0] and len(by_unit(model)) == 1
    gpt = small_gpt()
    assert segments_of(gpt) is gpt.segments


def test_segments_that_share_parameters_are_one_unit():
    """The unit is that of the first of them, and has each parameter once."""
    a, b, c, d = (Parameter(np.zeros(1)) for _ in range(4))
    model = MLP()
    model.segments = [Segment("1", None, [a]), Segment("2", None, [b]), Segment("3", None, [c, a, d])]
    assert by_unit(model) == [[a, c, d], [b]]


def test_units_are_numbered_unless_a_pipeline_has():
    parameters = [Parameter(np.zeros(n)) for n in (1, 2, 3)]
    parameters[2].placement = Placement("late", (3,), unit=7, units=9)
    groups = groups_over(serial(), [parameters[:2], parameters[2:]])
    number_units(groups)
    shown = [(p.name, p.shape, p.unit, p.units) for p in map(placement_of, parameters)]
    assert shown == [("0", (1,), 0, 2), ("1", (2,), 0, 2), ("late", (3,), 7, 9)]
    assert [(group.unit, len(group.parameters)) for group in groups] == [(0, 2), (1, 1)]


@pytest.mark.parametrize(
    ("bounds", "sizes"), [((16, 8), [[4], [2], [1]]), ((32, 8), [[4, 2], [1]]), ((17, 9), [[4], [2, 1]])]
)
def test_a_bucket_is_closed_by_the_bytes_that_fill_it(bounds, sizes):
    """The parameters have 16, 16 and 8 bytes."""
    arrays = [np.zeros(4, "float32"), np.zeros(2, "float64"), np.zeros(1, "float64")]
    parameters = [Parameter(array) for array in arrays]
    assert [[p.size for p in group] for group in by_size(parameters, *bounds)] == sizes


# ---- the norm --------------------------------------------------------------------------------------------------------


class Axis:
    """An axis whose ranks all hold the same values; it notes how many each sum has."""

    def __init__(self, size):
        self.size = size
        self.sums = []

    def all_reduce(self, x, algorithm):
        self.sums.append((x.shape, algorithm))
        x *= self.size


def placed(gradient, slice_of=None, **where):
    p = Parameter(np.zeros(len(gradient)))
    p.grad = np.array(gradient)
    p.placement = Placement("p", p.shape, dp=slice_of, **where)
    return p


def test_each_axis_adds_the_squares_that_its_ranks_hold():
    """Whole parameters count once, parts on each of three ranks of tp, units on each of two of pp; in two chunks of dp.

    With the values 1, 2 and 3 the sum of the squares is (1 + 4 + 3 * 9) * 2 = 64.
    """
    dp, tp, pp = Axis(2), Axis(3), Axis(2)
    whole = placed([1.0, 2.0], BucketSlice(0, 2, 2, 0, 2), unit=0, units=2)
    part = placed([3.0], BucketSlice(0, 1, 1, 0, 2), tp=Shard(0, 3, 0, 3), unit=1, units=2)
    copy = placed([5.0], BucketSlice(0, 1, 1, 0, 2), tp=Shard(0, 3, 0, 3, copies=2, copy=1), unit=1, units=2)
    assert clip_grad_norm([whole, part, copy], None, dp, tp, pp) == 8.0
    assert (dp.sums, tp.sums, pp.sums) == ([], [((2,), "ordered")], [((2, 2, 2), "ordered")])


def test_axes_of_one_rank_are_asked_for_nothing():
    dp, tp, pp = Axis(1), Axis(1), Axis(1)
    whole = placed([3.0, 4.0], BucketSlice(0, 2, 2, 0, 1), tp=Partial(0, 1), units=1)
    assert clip_grad_norm([whole], 1.0, dp, tp, pp) == 5.0
    np.testing.assert_allclose(whole.grad, [0.6, 0.8], rtol=1e-6)
    assert dp.sums == tp.sums == pp.sums == []


def test_ranks_that_hold_other_experts_add_their_own_chunks():
    dp = Axis(2)
    expert = placed([3.0, 4.0], BucketSlice(0, 2, 2, 0, 1), ep=1, units=1)
    other = placed([1.0, 7.0], BucketSlice(0, 2, 2, 0, 2), units=1)  # of which this rank counts the first
    assert clip_grad_norm([expert, other], None, dp) == pytest.approx(np.sqrt(2 * (25.0 + 1.0)), rel=1e-15)
    assert dp.sums == [((1,), "ordered")]


def test_a_parameter_in_no_bucket_is_refused_where_chunks_count():
    lonely = placed([3.0, 4.0], units=1)
    assert clip_grad_norm([lonely], None, serial()) == 5.0
    with pytest.raises(ValueError, match="p is in no bucket: wrap the model in a data-parallel strategy"):
        clip_grad_norm([lonely], None, serial(), chunks=2)
    assert bucket_slice(placed([1.0], BucketSlice(0, 1, 1, 0, 1))).size == 1


# ---- the same batch --------------------------------------------------------------------------------------------------


class Ranks:
    """Ranks 4, 6 and 8 of a world with batches of these checksums, seen from one of them."""

    axis = "dp"
    size = 3
    ranks = (4, 6, 8)

    def __init__(self, rank, *batches):
        self.rank = rank
        self.batches = batches
        self.own = None

    def all_gather_bytes(self, own):
        self.own = own
        return [batch.encode() for batch in self.batches]


NOTE = (
    "minipar: note: ranks {} and {} were given the same batch, which is then trained on twice; give each rank of dp "
    "samples of its own, such as x[rank::ranks]\n"
)


@pytest.mark.parametrize(
    ("batches", "rank", "noted"),
    [
        (("1", "2", "3"), 0, None),
        (("1", "2", "1"), 0, (4, 8)),
        (("1", "2", "2"), 0, (6, 8)),
        (("1", "1", "1"), 0, (4, 6)),
        (("1", "1", "1"), 1, None),
        (("1", "1", "1"), 2, None),
        (("", "", "2"), 0, None),
        (("1", "", ""), 0, None),
    ],
)
def test_one_rank_notes_the_first_two_batches_that_are_alike(batches, rank, noted, capfd):
    guards.note_same_batch(Ranks(rank, *batches), np.ones(2), np.ones(2))
    assert capfd.readouterr().err == ("" if noted is None else NOTE.format(*noted))


SOME = np.arange(3)
NOTHING = np.zeros(0)


@pytest.mark.parametrize(
    ("x", "y", "compared"), [(SOME, SOME, True), (SOME, NOTHING, False), (NOTHING, SOME, False), ((1, 2), SOME, False)]
)
def test_batches_without_elements_or_arrays_are_not_compared(x, y, compared):
    ranks = Ranks(0, "1", "2", "3")
    guards.note_same_batch(ranks, x, y)
    assert (ranks.own != b"") == compared


def test_a_checksum_tells_batches_apart():
    some = np.arange(3)
    assert guards.checksum(some, some) != guards.checksum(some) != guards.checksum(some + 1)
