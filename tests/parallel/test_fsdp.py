"""Claims about what ZeRO stages 2 and 3 hold and when: two gradients, two units, and nothing stale."""

import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from minipar.autograd import Function, no_grad
from minipar.comm import run_local
from minipar.memory import KINDS, MemoryLedger
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel import ZeroStage1, ZeroStage2, ZeroStage3, shard

# Six blocks of 2,197 elements; embedding and head, with few tokens, are smaller than a block: 13 * (17 + 8 + 2) = 351.
CONFIG = GPTConfig(vocab_size=17, n_positions=8, n_embd=13, n_layer=6, n_head=1)
BLOCK, ROOT, PSI = 2197, 351, 6 * 2197 + 351
STAGES = [0, 1, 2, 3]


def make(deferred=True):
    return GPT(CONFIG, dtype="float64", deferred=deferred)


def batch(rank):
    rows = np.random.Generator(np.random.Philox(rank)).integers(0, 17, (2, 9))
    return rows[:, :8], rows[:, 1:]


def backward(ddp):
    ddp.model.loss_sum(*batch(ddp.comm.rank)).backward(np.array(1.0))


def step(ddp, optimizer):
    """One whole training step."""
    ddp.zero_grad()
    backward(ddp)
    ddp.synchronize()
    optimizer.step()
    ddp.refresh_parameters()


def loss_of(ddp):
    """The loss of rank 0's samples, without a graph; every rank calls it."""
    with no_grad():
        return ddp.model.loss(*batch(0)).item()


def loss_of_serial(state):
    model = make(deferred=False)
    model.load_state_dict(state)
    return model.loss(*batch(0)).item()


# ---- how much at one time --------------------------------------------------------------------------------------------


class Watch:
    """The arrays given to it that still exist."""

    def __init__(self):
        self.references, self.most = [], 0

    def __call__(self, array):
        self.references = [r for r in self.references if r() is not None] + [weakref.ref(array)]
        self.most = max(self.most, len(self.references))


def watched(kind):
    """The class, with `.gradients` and `.units` counting full gradients and gathered units."""

    class Watched(kind):
        def __init__(self, *args, **kwargs):
            self.gradients, self.units = Watch(), Watch()
            super().__init__(*args, **kwargs)

        def _open(self, bucket):
            new = bucket not in self._full
            super()._open(bucket)
            if new:
                self.gradients(self._full[bucket])

        def _fetch(self, bucket):
            new = bucket not in self._gathered
            super()._fetch(bucket)
            if new:
                self.units(self._gathered[bucket][0])

    return Watched


class KeepsGradients(ZeroStage2):
    """Something goes on pointing at the full gradients after they have been reduced."""

    kept = ()

    def _start(self, bucket):
        self._open(bucket)
        self.kept = (*self.kept, self._full[bucket])
        super()._start(bucket)


class DoesNotWait(ZeroStage2):
    """Opens the next gradient however many are still travelling."""

    def _open(self, bucket):
        works, self._works = self._works, []
        super()._open(bucket)
        self._works = works


class NeverReleases(ZeroStage3):
    def _release(self, i):
        pass


def most_at_a_time(size, kind, **kwargs):
    """The most (full gradients, gathered units) on any rank in two passes, and what is left of either."""

    def rank(comm):
        ddp = watched(kind)(make(), comm, **kwargs)
        for turn in range(2):
            if comm.rank == 0 and turn == 0 and comm.size > 1:
                time.sleep(0.05)  # the others run ahead, and their messages stay where they are
            ddp.zero_grad()
            backward(ddp)
            ddp.synchronize()
        return ddp.gradients.most, ddp.units.most, len(ddp._full), len(getattr(ddp, "_gathered", ()))

    return tuple(max(numbers) for numbers in zip(*run_local(size, rank), strict=True))


@pytest.mark.parametrize("algorithm", ["ring", "ordered"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stage_2_never_has_more_than_two_full_gradients(size, algorithm):
    gradients, *others = most_at_a_time(size, ZeroStage2, algorithm=algorithm)
    assert 1 <= gradients <= 2 and others == [0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stage_3_never_has_more_than_two_units_parameters(size):
    """With prefetching the one in use and the next one; without, only the one in use."""
    for prefetch in (True, False):
        gradients, units, *left = most_at_a_time(size, ZeroStage3, prefetch=prefetch)
        assert 1 <= gradients <= 2 and units == 1 + prefetch and left == [0, 0]


def test_the_watch_sees_what_is_kept():
    assert most_at_a_time(3, KeepsGradients)[0] == 14  # seven buckets, twice
    assert most_at_a_time(3, DoesNotWait)[0] > 2
    assert most_at_a_time(3, NeverReleases)[1] == 7


def ledger_of(size, kind, phases):
    """Each rank's [{kind of memory: most bytes} of each phase]; a phase is a function of the strategy."""

    def rank(comm):
        ledger, most = MemoryLedger(), []
        with ledger.recording():
            ddp = kind(make(), comm)
            for phase in phases:
                ledger.enter("", restart=True)
                phase(ddp)
                most.append(dict(zip(KINDS, np.max([held for _, held in ledger.moments], axis=0), strict=True)))
        return most

    return run_local(size, rank)


def forward_with_a_graph(ddp):
    ddp.kept = ddp.model.loss_sum(*batch(ddp.comm.rank))


@pytest.mark.parametrize("forward", [loss_of, forward_with_a_graph])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_in_forward_the_ledger_shows_two_blocks_parameters_and_no_weight_kept_in_the_graph(size, forward):
    for (most,) in ledger_of(size, ZeroStage3, [forward]):
        assert most["buffers"] == 2 * BLOCK * 8
        assert most["parameters"] <= -(-BLOCK // size) * 6 * 8 + -(-ROOT // size) * 8


def test_the_ledger_shows_a_unit_that_is_not_released_and_a_weight_kept_by_the_graph(monkeypatch):
    for (most,) in ledger_of(3, NeverReleases, [loss_of]):
        assert most["buffers"] == PSI * 8
    monkeypatch.setattr(Function, "at_backward", lambda self, i, array: lambda: array)
    for (most,) in ledger_of(3, ZeroStage3, [loss_of]):
        assert most["buffers"] == 2 * BLOCK * 8  # without a graph nothing keeps it
    for (most,) in ledger_of(3, ZeroStage3, [forward_with_a_graph]):
        assert most["buffers"] > 6 * BLOCK * 8


@pytest.mark.parametrize(("kind", "units"), [(ZeroStage2, 0), (ZeroStage3, 2)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_in_backward_the_ledger_shows_two_gradients_beside_the_units(size, kind, units):
    def whole_pass(ddp):
        backward(ddp)
        ddp.synchronize()

    head = 17 * 13 + 2 * 13  # the tied gradient of the token table and ln_f's wait for the embedding's
    rooms = 2 * -(-BLOCK // size)  # in which the ring's messages arrive and wait
    for (most,) in ledger_of(size, kind, [whole_pass]):
        assert BLOCK * 8 < most["buffers"] <= ((2 + units) * BLOCK + head + rooms) * 8 < PSI * 8


@pytest.mark.parametrize("size", [2, 3, 8])
def test_setting_up_stage_3_never_holds_the_whole_model(size):
    """Numbers that were put off are made one array at a time, in the room of one unit, of which the rank's share stays:
    the peak is the share, twice (parameters and gradients), and one unit."""

    def rank(comm):
        model, made, ledger = make(), Watch(), MemoryLedger()

        def watching(numbers):
            made(numbers)
            return numbers

        for p in model.parameters():
            p.deferred = replace(p.deferred, make=lambda make=p.deferred.make: watching(make()))
        with ledger.recording():
            ddp = ZeroStage3(model, comm)
        return ledger.peak, dict(ledger.held), made.most, sum(chunk.data.size for chunk in ddp.chunks.values())

    for peak, held, made, own in run_local(size, rank):
        assert made == 1 and (2 * own) * 8 < peak <= (2 * own + BLOCK) * 8
        assert peak < PSI * 8 or size == 2  # two ranks' shares of parameters and gradients are Psi already
        assert held == dict.fromkeys(KINDS, 0) | {"parameters": own * 8, "gradients": own * 8}


# ---- nothing stale ---------------------------------------------------------------------------------------------------


class NeverForgets(ZeroStage3):
    """What a forward without a backward has left gathered is used again after the step."""

    def refresh_parameters(self):
        pass


def train_with_forwards(comm, kind, forward, steps=2):
    """Steps with a forward that no backward follows before, after and in the middle of each."""
    ddp = kind(make(), comm)
    optimizer = AdamW(ddp.optimized, lr=0.1)
    for _ in range(steps):
        forward(ddp)
        ddp.zero_grad()
        with ddp.no_sync():
            backward(ddp)
        forward(ddp)
        backward(ddp)
        ddp.synchronize()
        forward(ddp)
        optimizer.step()
        ddp.refresh_parameters()
    return loss_of(ddp), ddp.state_dict(), comm.traffic.bytes("reduce_scatter")


def nothing(ddp):
    pass


@pytest.mark.parametrize("forward", [loss_of, forward_with_a_graph])
@pytest.mark.parametrize("kind", [ZeroStage1, ZeroStage2, ZeroStage3])
@pytest.mark.parametrize("size", [1, 3])
def test_a_forward_without_a_backward_changes_nothing_and_the_next_sees_the_step(size, kind, forward):
    loss, state, sent = run_local(size, train_with_forwards, kind, forward)[0]
    _, expected, expected_sent = run_local(size, train_with_forwards, kind, nothing)[0]
    assert {name: x.tobytes() for name, x in state.items()} == {name: x.tobytes() for name, x in expected.items()}
    assert sent == expected_sent
    assert loss == loss_of_serial(state)


def test_numbers_that_are_not_forgotten_are_seen_to_be_stale():
    loss, state, _ = run_local(2, train_with_forwards, NeverForgets, forward_with_a_graph)[0]
    assert loss != loss_of_serial(state)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_that_the_loss_does_not_use_count_as_zero(size, stage):
    """The embedding alone, after a pass that left other numbers wherever gradients lie."""

    def rank(comm):
        ddp = shard(make(), comm, stage, "ordered")
        backward(ddp)
        ddp.synchronize()
        ddp.zero_grad()
        ddp.model.parts[0].run(batch(comm.rank)[0]).sum().backward()
        ddp.synchronize()
        norm = ddp.clip_grad_norm(None)
        if stage == 0:
            return norm, [ddp.buffers.gradients]
        return norm, [chunk.gradient for chunk in ddp.chunks.values()]

    # Each of the 16*size tokens adds 1 to the row of its token and to that of its position, in all 13 columns.
    tokens = np.bincount(np.concatenate([batch(r)[0].ravel() for r in range(size)]), minlength=17)
    squares = 13 * (float((tokens**2).sum()) + 8 * (2 * size) ** 2)
    results = run_local(size, rank)
    assert all(norm == pytest.approx(np.sqrt(squares), rel=1e-14) for norm, _ in results)
    used = sum(np.count_nonzero(array) for _, arrays in results for array in arrays) / (size if stage == 0 else 1)
    assert used == 13 * (np.count_nonzero(tokens) + 8)


@pytest.mark.parametrize("stage", STAGES)
def test_detaching_gives_the_model_its_own_parts_back(stage):
    def rank(comm):
        model = make()
        before = [part.run for part in model.parts]
        ddp = shard(model, comm, stage)
        assert ([part.run for part in model.parts] == before) == (stage < 2)
        ddp.detach()
        after = [part.run for part in model.parts]
        comm.traffic.reset()
        if stage < 3:
            backward(ddp)
        return after == before, comm.traffic.messages()

    assert run_local(2, rank) == [(True, 0)] * 2


# ---- the parameters, whole again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rank_0_gets_every_parameter_by_name_and_the_others_none(size, stage):
    def rank(comm):
        ddp = shard(make(), comm, stage)
        return ddp.state_dict(), [name for name, _ in ddp.model.named_parameters()]

    (state, names), *others = run_local(size, rank)
    expected = make(deferred=False).state_dict()
    assert list(state) == names == list(expected)
    for name, x in expected.items():
        assert state[name].shape == x.shape and state[name].tobytes() == x.tobytes() and state[name].flags.c_contiguous
    assert all(other == {} for other, _ in others)


def test_the_state_is_a_copy_that_training_does_not_change():
    def rank(comm, stage):
        ddp = shard(make(), comm, stage)
        before = ddp.state_dict()
        bits = [x.tobytes() for x in before.values()]
        step(ddp, AdamW(ddp.optimized))
        changed = [x.tobytes() for x in ddp.state_dict().values()]
        return all(a != b for a, b in zip(bits, changed, strict=True)), bits == [x.tobytes() for x in before.values()]

    for stage in STAGES:
        assert run_local(3, rank, stage) == [(True, True)] * 3


def test_a_released_parameter_reads_as_nan_never_as_old_numbers():
    def rank(comm):
        ddp = ZeroStage3(make(deferred=False), comm)
        states = []
        for use in (nothing, loss_of, lambda ddp: step(ddp, AdamW(ddp.optimized))):
            use(ddp)
            states.append(ddp.model.state_dict())
        assert all(np.isnan(tie.data).all() for p in ddp.model.parameters() for tie in p.ties)
        return states

    for states in run_local(3, rank):
        for state in states:
            assert list(state) == [name for name, _ in make().named_parameters()]
            assert all(np.isnan(x).all() for x in state.values())
