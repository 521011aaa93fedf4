"""Claims about what ZeRO stages 2 and 3 hold and when: two gradients, two units, and nothing stale."""

import time
import weakref

import numpy as np
import pytest
from training import MLP, Proxy, backward, bits, clip, small_gpt, text, whole_state

from minipar.autograd import no_grad
from minipar.comm import run_local
from minipar.memory import KINDS, MemoryLedger, enter
from minipar.nn import AdamW
from minipar.parallel.fsdp import FullyShardedDataParallel
from minipar.parallel.wrap import shard
from minipar.parallel.zero import ZeroStage1, ZeroStage2

# Six blocks of 2,197 elements; embedding and head, with few tokens, are smaller than a block: 13 * (17 + 8 + 2) = 351.
BLOCK, ROOT, PSI = 2197, 351, 6 * 2197 + 351
STAGES = [0, 1, 2, 3]


def make():
    return small_gpt(layers=6)


def batch(rank):
    return text([2 * rank, 2 * rank + 1])


def one_pass(ddp):
    backward(ddp, *batch(ddp.comm.rank))
    ddp.synchronize()


def step(ddp, optimizer):
    """One whole training step."""
    ddp.zero_grad()
    one_pass(ddp)
    optimizer.step()


def loss_of(ddp):
    """The loss of rank 0's samples, without a graph; every rank calls it."""
    with no_grad():
        return ddp.model.loss(*batch(0)).item()


def loss_of_serial(state):
    model = make()
    model.load_state_dict(state)
    return model.loss(*batch(0)).item()


# ---- how much at one time --------------------------------------------------------------------------------------------


class Watch:
    """The arrays given to it that still exist, and the most that existed at one time.

    The thread of another rank may refer to an array for a moment after it has delivered a message. So a count
    above `allowed` is taken again until that thread has gone on; what this rank itself keeps does not vanish.
    """

    def __init__(self, allowed):
        self.allowed, self.references, self.most = allowed, [], 0

    def __call__(self, array):
        if all(r() is not array for r in self.references):
            self.references.append(weakref.ref(array))
        deadline = time.monotonic() + 0.2
        while self.left > self.allowed >= self.most and time.monotonic() < deadline:
            time.sleep(0.001)
        self.most = max(self.most, self.left)
        self.references = [r for r in self.references if r() is not None]

    @property
    def left(self):
        return sum(r() is not None for r in self.references)


class Watched(Proxy):
    """A communicator that counts, at every call, full gradients and gathered units."""

    def __init__(self, comm, model, units=2):
        super().__init__(comm)
        self.model, self.gradients, self.units = model, Watch(allowed=2), Watch(allowed=units)

    def look(self):
        for p in self.model.parameters():
            if p.grad_buffer is not None:
                self.gradients(p.grad_buffer.base)

    def progress(self):  # called when a gradient is complete
        self.look()
        self.comm.progress()

    def all_gather(self, array, out, **options):
        self.look()
        self.units(out)
        return self.comm.all_gather(array, out=out, **options)

    def reduce_scatter(self, full, **options):
        self.look()
        return self.comm.reduce_scatter(full, **options)


def most_at_a_time(size, kind, prefetch=True, **kwargs):
    """The most (full gradients, gathered units) on any rank in two passes, and what is left of either."""

    def rank(comm):
        model = make()
        watch = Watched(comm, model, units=1 + prefetch)
        ddp = kind(model, watch, **kwargs)
        ddp.prefetch = prefetch
        for turn in range(2):
            if comm.rank == 0 and turn == 0 and comm.size > 1:
                time.sleep(0.05)  # the others run ahead, and their messages stay where they are
            ddp.zero_grad()
            one_pass(ddp)
        return watch.gradients.most, watch.units.most, watch.gradients.left, watch.units.left

    return tuple(max(counts) for counts in zip(*run_local(size, rank), strict=True))


@pytest.mark.parametrize(("size", "algorithm"), [(1, "ring"), (2, "ordered"), (5, "ring")])
def test_stage_2_never_has_more_than_two_full_gradients(size, algorithm):
    gradients, *others = most_at_a_time(size, ZeroStage2, algorithm=algorithm)
    assert 1 <= gradients <= 2 and others == [0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stage_3_never_has_more_than_two_units_parameters(size):
    """With prefetching the one in use and the next one; without, only the one in use."""
    for prefetch in (True, False):
        gradients, units, *left = most_at_a_time(size, FullyShardedDataParallel, prefetch=prefetch)
        assert 1 <= gradients <= 2 and units == 1 + prefetch and left == [0, 0]


def ledger_of(size, kind, phase):
    """Each rank's {kind of memory: most bytes} of a phase, a function of the strategy."""

    def rank(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            ddp = kind(make(), comm)
            enter("", restart=True)
            phase(ddp)
            return dict(zip(KINDS, np.max([held for _, held in ledger.moments], axis=0), strict=True))

    return run_local(size, rank)


def forward_with_a_graph(ddp):
    ddp.kept = ddp.model.loss_sum(*batch(ddp.comm.rank))


@pytest.mark.parametrize("forward", [loss_of, forward_with_a_graph])
@pytest.mark.parametrize("size", [1, 3])
def test_forward_holds_two_blocks_and_the_graph_keeps_no_weight(size, forward):
    for most in ledger_of(size, FullyShardedDataParallel, forward):
        assert most["buffers"] == 2 * BLOCK * 8
        assert most["parameters"] <= -(-BLOCK // size) * 6 * 8 + -(-ROOT // size) * 8


@pytest.mark.parametrize(("kind", "units"), [(ZeroStage2, 0), (FullyShardedDataParallel, 2)])
@pytest.mark.parametrize("size", [2, 5])
def test_backward_holds_two_gradients_next_to_the_units(size, kind, units):
    head = 17 * 13 + 2 * 13  # the tied gradient of the token table and ln_f's wait for the embedding's
    messages = 2 * -(-BLOCK // size)  # where the ring's messages arrive and wait
    for most in ledger_of(size, kind, one_pass):
        assert BLOCK * 8 < most["buffers"] <= ((2 + units) * BLOCK + head + messages) * 8 < PSI * 8


# ---- nothing stale ---------------------------------------------------------------------------------------------------


def train_with_forwards(comm, kind, forward, steps=2):
    """Steps with a forward that no backward follows before, after and in the middle of each."""
    ddp = kind(make(), comm)
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        forward(ddp)
        ddp.zero_grad()
        with ddp.no_sync():
            backward(ddp, *batch(comm.rank))
        forward(ddp)
        one_pass(ddp)
        forward(ddp)
        optimizer.step()
    return loss_of(ddp), whole_state(ddp), comm.traffic.bytes("reduce_scatter")


def nothing(ddp):
    pass


@pytest.mark.parametrize("forward", [loss_of, forward_with_a_graph])
@pytest.mark.parametrize("kind", [ZeroStage1, ZeroStage2, FullyShardedDataParallel])
@pytest.mark.parametrize("size", [1, 3])
def test_a_forward_without_backward_changes_nothing(size, kind, forward):
    loss, state, sent = run_local(size, train_with_forwards, kind, forward)[0]
    _, expected, expected_sent = run_local(size, train_with_forwards, kind, nothing)[0]
    assert bits(state) == bits(expected) and sent == expected_sent
    assert loss == loss_of_serial(state)  # the forward after the step sees it


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 3])
def test_parameters_that_the_loss_does_not_use_count_as_zero(size, stage):
    """The embedding alone, after a pass that left other numbers wherever gradients lie."""

    def rank(comm):
        ddp = shard(make(), comm, stage, "ordered")
        one_pass(ddp)
        ddp.zero_grad()
        with ddp.scaled_backward():
            ddp.model.segments[0].run(batch(comm.rank)[0]).sum().backward()
        ddp.synchronize()
        norm = clip(ddp, None)
        if stage == 0:
            return norm, [bucket.gradient for bucket in ddp.buckets]
        return norm, [bucket.chunk.gradient for bucket in ddp.buckets]

    # Each of the 16*size tokens adds 1 to the row of its token and to that of its position, in all 13 columns.
    tokens = np.bincount(np.concatenate([batch(r)[0].ravel() for r in range(size)]), minlength=17)
    squares = 13 * (float((tokens**2).sum()) + 8 * (2 * size) ** 2)
    results = run_local(size, rank)
    assert all(norm == pytest.approx(np.sqrt(squares), rel=1e-14) for norm, _ in results)
    used = sum(np.count_nonzero(array) for _, arrays in results for array in arrays) / (size if stage == 0 else 1)
    assert used == 13 * (np.count_nonzero(tokens) + 8)


# ---- the parameters, whole again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_rank_0_gets_every_parameter_by_name_others_none(size, stage):
    def rank(comm):
        ddp = shard(make(), comm, stage)
        return whole_state(ddp), [name for name, _ in ddp.model.named_parameters()]

    (state, names), *others = run_local(size, rank)
    expected = make().state_dict()
    assert list(state) == names == list(expected)
    for name, x in expected.items():
        assert state[name].shape == x.shape and state[name].tobytes() == x.tobytes() and state[name].flags.c_contiguous
    assert all(other == {} for other, _ in others)


def test_the_state_is_a_copy_that_training_does_not_change():
    def rank(comm, stage):
        ddp = shard(make(), comm, stage)
        before = whole_state(ddp)
        bits = [x.tobytes() for x in before.values()]
        step(ddp, AdamW(ddp.parameters()))
        changed = [x.tobytes() for x in whole_state(ddp).values()]
        return all(a != b for a, b in zip(bits, changed, strict=True)), bits == [x.tobytes() for x in before.values()]

    for stage in STAGES:
        assert run_local(3, rank, stage) == [(True, True)] * 3


def test_a_released_parameter_reads_as_nan_never_as_old_values():
    def rank(comm):
        ddp = FullyShardedDataParallel(make(), comm)
        states = []
        for use in (nothing, loss_of, lambda ddp: step(ddp, AdamW(ddp.parameters()))):
            use(ddp)
            states.append({name: np.array(p.data) for name, p in ddp.model.named_parameters()})
            with pytest.raises(ValueError):
                ddp.model.state_dict()
            with pytest.raises(ValueError):
                ddp.model.load_state_dict(states[0])
        assert all(np.isnan(tie.data).all() for p in ddp.model.parameters() for tie in p.ties)
        return states

    for states in run_local(3, rank):
        for state in states:
            assert list(state) == [name for name, _ in make().named_parameters()]
            assert all(np.isnan(x).all() for x in state.values())


def test_a_users_module_is_released_when_its_backward_ends():
    """Its input is data, which takes no gradient: no operation of the graph comes last. The queued callback does."""

    def rank(comm):
        ddp, x = FullyShardedDataParallel(MLP(), comm), np.ones((2, 3))
        ddp.loss(x, np.ones((2, 1))).backward()
        return all(np.isnan(p.data).all() for p in ddp.model.parameters())

    assert run_local(2, rank) == [True, True]
