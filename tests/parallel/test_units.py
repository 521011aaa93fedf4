"""Claims about the units of ZeRO stage 3: which a segment reads, which come next, and when they are gathered."""

import numpy as np
import pytest
from training import MLP, Proxy, small_gpt, text

from minipar.autograd import no_grad
from minipar.comm import run_local
from minipar.nn import Parameter
from minipar.nn.module import Segment
from minipar.parallel.fsdp import FullyShardedDataParallel, units_of_segments
from minipar.parallel.parallelize import shard


class NamedUnit:
    """A unit as far as segments need one, with a name."""

    def __init__(self, name, parameters):
        self.name = name
        self.parameters = parameters


def described(needs):
    """Return what a segment needs, by the units' names."""
    fields = (needs.reads, needs.next_in_forward, needs.next_in_backward, needs.completes)
    return needs.segment.name, *["".join(unit.name for unit in units) for units in fields]


def test_the_needs_of_segments_follow_from_their_neighbours():
    """The lookup's backward reads nothing. The head reads the embedding, too; the parameter Z is in no unit."""
    a, b, b2, c, z = (Parameter(np.zeros(1)) for _ in range(5))
    units = [NamedUnit("A", [a]), NamedUnit("B", [b, b2]), NamedUnit("C", [c])]
    lists = [
        [
            Segment("lookup", None, [a], reads_in_backward=False),
            Segment("first", None, [b, b2]),
            Segment("second", None, [c]),
            Segment("head", None, [z, c, a], is_last=True),
        ],
        [Segment("again", None, [b]), Segment("end", None, [c])],
    ]
    assert [described(needs) for needs in units_of_segments(lists, units)] == [
        ("lookup", "A", "B", "", "A"),
        ("first", "B", "C", "", "B"),
        ("second", "C", "CA", "B", "C"),
        ("head", "CA", "", "C", ""),
        ("again", "B", "C", "", ""),
        ("end", "C", "", "B", ""),
    ]


class Gathers(Proxy):
    """A communicator that notes the size of each unit whose gather starts."""

    def __init__(self, comm, notes):
        super().__init__(comm)
        self.notes = notes

    def all_gather(self, chunk, out, **options):
        self.notes.append(out.size)
        return self.comm.all_gather(chunk, out=out, **options)


ENDS = 351  # elements of the unit of both ends of the model
BLOCK = 2197  # elements of a block's unit


@pytest.mark.parametrize(("options", "early"), [({}, True), ({"prefetch": True}, True), ({"prefetch": False}, False)])
def test_the_next_unit_is_gathered_before_a_segment_runs(options, early):
    """By default the next segment's unit travels while a segment runs, in forward and in backward."""

    def rank(comm):
        notes = []
        model = small_gpt(layers=2)
        for segment in model.segments:
            segment.run = noted(segment, notes)
        ddp = FullyShardedDataParallel(model, Gathers(comm, notes), **options)
        loss = ddp.loss(*text([comm.rank]))
        notes.append("backward")
        loss.backward()
        return notes

    names = [segment.name for segment in small_gpt(layers=2).segments]
    assert len(names) == 4
    for notes in run_local(2, rank):
        forward = notes[: notes.index("backward")]
        backward = notes[notes.index("backward") + 1 :]
        if early:
            assert forward == [ENDS, BLOCK, names[0], BLOCK, names[1], ENDS, names[2], BLOCK, names[3]]
            assert backward == [BLOCK]
        else:
            assert forward == [ENDS, names[0], BLOCK, names[1], BLOCK, names[2], ENDS, names[3]]
            assert backward == [BLOCK, BLOCK]


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_of_ones_own_is_gathered_once(trained):
    """It is one unit. Its loss calls its forward, which calls two layers: all of them find the whole unit."""

    def rank(comm):
        notes = []
        model = MLP()
        size = sum(p.size for p in model.parameters())
        ddp = FullyShardedDataParallel(model, Gathers(comm, notes))
        x, y = np.ones((2, 3)), np.ones((2, 1))
        if trained:
            ddp.loss(x, y).backward()
        else:
            with no_grad():
                model.loss_sum(x, y)
        assert notes == [size]
        for p in model.parameters():
            assert np.isnan(p.data).all()  # it is freed again

    run_local(2, rank)


def noted(segment, notes):
    """Return the segment's own run, which notes its name first."""
    run = segment.run

    def noting(x):
        notes.append(segment.name)
        return run(x)

    return noting


# ---- where gradients are written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_backward_writes_each_gradient_into_its_buckets_array(stage):
    """The array is there before the first gradient of the bucket, from the segment on that comes to the bucket last."""

    def rank(comm):
        found = []
        model = small_gpt(layers=2)
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda leaf, name=name: found.append((name, where(leaf))))
        ddp = shard(model, comm, stage)

        def where(leaf):
            (bucket,) = [each for each in ddp.buckets if leaf in each.parameters]
            return bucket.gradient is not None and np.shares_memory(leaf.grad, bucket.gradient)

        ddp.loss(*text([comm.rank])).backward()
        return found

    for found in run_local(2, rank):
        assert len(found) == len(small_gpt(layers=2).parameters()) and found[0][0].startswith("ln_f")
        early = {"ln_f.weight", "ln_f.bias"}  # of the head, before backward comes to the embedding
        assert {name for name, is_there in found if not is_there} == early


def test_stage_2_makes_each_buckets_array_once_and_in_order():
    """The array that embedding and head share is made where backward comes to the embedding."""

    def rank(comm):
        made = []
        ddp = shard(small_gpt(layers=2), comm, 2)
        right = ddp.pre_backward

        def noting(bucket):
            made.append(ddp.buckets.index(bucket))
            right(bucket)

        ddp.pre_backward = noting
        ddp.loss(*text([comm.rank])).backward()
        return made

    assert run_local(2, rank) == [[0, 1, 2]] * 2
