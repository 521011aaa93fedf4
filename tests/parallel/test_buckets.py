"""Claims about buckets: which parameters travel together, when they are sent, and what a rank's chunk of one holds."""

import numpy as np
import pytest
from training import MLP, OneOf, Proxy, bits, gradient_of, small_gpt, text

from minipar.comm import run_local, serial
from minipar.more.casting import CastingComm
from minipar.nn import Parameter
from minipar.nn.module import Segment
from minipar.parallel.buckets import BackwardHooks, Bucket, by_unit
from minipar.parallel.chunks import Chunk
from minipar.parallel.placement import Placement, attach_placements
from minipar.parallel.wrap import fully_shard, shard

# ---- which parameters travel together --------------------------------------------------------------------------------


def test_segments_that_share_parameters_are_one_unit():
    """The unit is that of the first of them, and has each parameter once."""
    a, b, c, d = (Parameter(np.zeros(1)) for _ in range(4))
    model = MLP()
    assert by_unit(model) == [model.parameters()]
    model.segments = [Segment("1", None, [a]), Segment("2", None, [b]), Segment("3", None, [c, a, d])]
    assert by_unit(model) == [[a, c, d], [b]]


# ---- when they are sent ----------------------------------------------------------------------------------------------


class Watched:
    """The hooks of a model's buckets, and which buckets they have sent."""

    def __init__(self, model, *groups):
        attach_placements(model)
        self.model = model
        self.sent = []
        self.buckets = [Bucket(group, serial()) for group in groups]
        for bucket in self.buckets:
            bucket.allocate_gradient("gradients")[:] = np.nan
        self.hooks = BackwardHooks(self.buckets, lambda: None, self.send)

    def send(self, bucket):
        bucket.complete()
        self.sent.append(self.buckets.index(bucket))

    def backward(self):
        self.sent.clear()
        self.model.loss_sum(np.ones((2, 3)), np.ones((2, 1))).backward()
        return self.sent


@pytest.mark.parametrize("order", ["first second", "second first"])
def test_a_bucket_waits_for_those_before_it(order):
    """Backward completes the second layer first; all ranks send in the buckets' order."""
    model = MLP()
    watched = Watched(model, *[getattr(model, layer).parameters() for layer in order.split()])
    assert watched.backward() == [0, 1]


def test_what_the_loss_does_not_use_is_sent_at_the_end_as_zeros():
    model, unused = MLP(), MLP()
    attach_placements(unused)
    watched = Watched(model, unused.parameters(), model.parameters())
    assert watched.backward() == []
    watched.hooks.finish()
    assert watched.sent == [0, 1]
    assert not watched.buckets[0].gradient.any() and watched.buckets[1].gradient.any()
    assert watched.backward() == [], "the next pass starts again"


class Gathers(Proxy):
    """A communicator that notes the size of each unit whose gather starts."""

    def __init__(self, comm, notes):
        super().__init__(comm)
        self.notes = notes

    def all_gather(self, chunk, out, **options):
        self.notes.append(out.size)
        return self.comm.all_gather(chunk, out=out, **options)


ENDS, BLOCK = 351, 2197  # elements of the unit of both ends of the model, and of a block's


@pytest.mark.parametrize(("prefetch", "forward", "backward"), [
    (True, [ENDS, BLOCK, "embedding", BLOCK, "h.0", ENDS, "h.1", BLOCK, "head"], [BLOCK]),
    (False, [ENDS, "embedding", BLOCK, "h.0", BLOCK, "h.1", ENDS, "head"], [BLOCK, BLOCK]),
])  # fmt: skip
def test_the_next_unit_is_gathered_before_a_segment_runs(prefetch, forward, backward):
    def rank(comm):
        notes = []
        model = small_gpt(layers=2)
        for segment in model.segments:
            run, name = segment.run, segment.name
            segment.run = lambda x, run=run, name=name: (notes.append(name), run(x))[1]
        ddp = fully_shard(model, Gathers(comm, notes))
        ddp.prefetch = prefetch
        ddp.loss(*text([comm.rank])).backward()
        return notes

    assert run_local(2, rank) == [forward + backward] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_backward_writes_each_gradient_into_its_buckets_array(stage):
    """The array is there before the bucket's first gradient; that of embedding and head from the embedding on."""

    def rank(comm):
        early = set()
        model = small_gpt(layers=2)

        def note(name, leaf):
            (bucket,) = [each for each in ddp.buckets if leaf in each.parameters]
            if bucket.gradient is None or not np.shares_memory(leaf.grad, bucket.gradient):
                early.add(name)

        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda leaf, name=name: note(name, leaf))
        ddp = shard(model, comm, stage)
        ddp.loss(*text([comm.rank])).backward()
        return early

    assert run_local(2, rank) == [{"ln_f.weight", "ln_f.bias"}] * 2


# ---- a rank's chunk --------------------------------------------------------------------------------------------------


def bucket_of(rank, ranks, *sizes):
    parameters = [Parameter(np.zeros(n)) for n in sizes]
    for p in parameters:
        p.placement = Placement("", p.shape)
    return Bucket(parameters, OneOf(rank, ranks))


def test_a_chunk_has_a_shard_of_each_parameter_in_it():
    """Ten elements on three ranks: 4, 3, 3."""
    flat = np.arange(10.0)
    found = []
    for rank in range(3):
        bucket = bucket_of(rank, 3, 3, 4, 1, 2)
        shards = Chunk(bucket, flat[bucket.own], np.zeros(bucket.own.stop - bucket.own.start)).shards
        found.append([(shard.elements.start, shard.elements.stop, shard.data.tolist()) for shard in shards])
    assert found == [
        [(0, 3, [0.0, 1.0, 2.0]), (0, 1, [3.0])],
        [(1, 4, [4.0, 5.0, 6.0])],
        [(0, 1, [7.0]), (0, 2, [8.0, 9.0])],
    ]


def test_a_sum_in_another_dtype_is_cast_back_and_float64_stays():
    def rank(comm):
        casting = CastingComm(comm, "float16")
        found = []
        for dtype in ("float32", "float64"):
            x, chunk = np.array([1.0, 2 + 2.0**-20], dtype), np.empty(1, dtype)
            casting.reduce_scatter(x, out=chunk, algorithm="ordered", async_op=True).wait()
            casting.all_reduce(x, algorithm="ordered")
            found.append((x.tolist(), chunk.tolist()))
        return found

    small = 2.0**-19
    first = [([2.0, 4.0], [2.0]), ([2.0, 4.0 + small], [2.0])]
    assert run_local(2, rank) == [first, [([2.0, 4.0], [4.0]), ([2.0, 4.0 + small], [4.0 + small])]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrapper_sums_over_the_communicator_that_it_is_given(stage):
    """In bfloat16 the first step's gradients are near those of float32, and no rank's differ."""

    def rank(comm, dtype):
        model = MLP()
        for p in model.parameters():
            p.data = p.data.astype("float32")
        ddp = shard(model, comm if dtype is None else CastingComm(comm, dtype), stage, "ordered")
        draw = np.random.Generator(np.random.Philox(comm.rank)).standard_normal
        ddp.loss(draw((2, 3)).astype("float32"), draw((2, 1)).astype("float32")).backward()
        return gradient_of(ddp)

    exact, (first, second) = run_local(2, rank, None)[0], run_local(2, rank, "bfloat16")
    assert bits(first) == bits(second) != bits(exact)
    for name, gradient in exact.items():
        assert np.abs(first[name] - gradient).max() <= 2.0**-7 * np.abs(gradient).max() + 2.0**-6, name
