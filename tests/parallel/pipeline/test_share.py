"""Claims about a rank's share of a model: whose parameters it has, the tied embedding's two ends, and what it keeps."""

import gc
import weakref

import numpy as np
import pytest
from pipeline_cases import execute_rank
from training import Proxy, small_gpt

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import Llama, LlamaConfig
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineParallel

VALUES = 17 * 13  # of the token embedding


def test_a_schedule_for_another_number_of_ranks_is_refused():
    def rank(comm):
        with pytest.raises(UsageError, match="^schedule 1f1b is for 3 ranks, but pp = 2$"):
            PipelineParallel(small_gpt(), comm, make("1f1b", 3, 2), 8)

    run_local(2, rank)


def test_each_parameter_has_the_rank_and_number_of_its_segment():
    def rank(comm):
        model = small_gpt()
        pipeline = PipelineParallel(model, comm, make("1f1b", 2, 2), 8)
        own = [p.placement.name for group in pipeline.groups for p in group]
        units = {}
        for p in model.parameters():
            assert p.placement.units == 5
            units.setdefault(p.placement.unit, set()).add(p.placement.pp)
        assert own == [p.placement.name for p in model.parameters() if p.placement.pp == comm.rank]
        return units, (pipeline.first, pipeline.last, pipeline.borrower), sorted(pipeline.stages)

    units = {0: {0}, 1: {0}, 2: {0}, 3: {1}, 4: {1}}
    found = run_local(2, rank)
    assert [stages for *_, stages in found] == [[0], [1]]
    assert [place for _, place, _ in found] == [(0, 1, 1)] * 2
    assert [each for each, *_ in found] == [units] * 2


def test_only_the_rank_that_borrows_the_embedding_holds_a_copy():
    def rank(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            PipelineParallel(small_gpt(), comm, make("1f1b", 3, 2), 8)
        return ledger.held["buffers"]

    assert run_local(3, rank) == [0, 0, 8 * VALUES]


@pytest.mark.parametrize("p", [2, 3])
def test_the_updated_embedding_goes_to_the_rank_that_borrows_it(p):
    """It goes once, from the first rank to the last; nobody else gathers its values."""

    def rank(comm):
        model = small_gpt()
        pipeline = PipelineParallel(model, comm, make("1f1b", p, 2), 8)
        asked = []

        def whole(parameter):
            asked.append(parameter.placement.name)
            return np.full(parameter.shape, 7.0)

        comm.traffic.reset()
        pipeline.send_tied_weight(whole)
        values = set(model.token_embedding.data.ravel().tolist()) if comm.rank == p - 1 else None
        return asked, comm.traffic.bytes(), values

    first, *between, last = run_local(p, rank)
    assert first == (["wte.weight"], 8 * VALUES, None)
    assert between == [([], 0, None)] * (p - 2)
    assert last == ([], 0, {7.0})


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_head_of_its_own_or_on_the_same_rank_is_not_sent(schedule):
    """Llama's head is no token embedding, and a V has both ends of the model on rank 0."""

    def rank(comm):
        if schedule == "zbv":
            model = small_gpt(layers=4)
        else:
            config = LlamaConfig(
                vocab_size=17,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=4,
                num_attention_heads=2,
                max_position_embeddings=8,
            )
            model = Llama(config, dtype="float64")
        pipeline = PipelineParallel(model, comm, make(schedule, 2, 4), 8)
        comm.traffic.reset()
        pipeline.fetch_tied_gradient()
        pipeline.send_tied_weight(lambda parameter: pytest.fail("nobody needs it"))
        return pipeline.borrower, comm.traffic.bytes()

    assert run_local(2, rank) == [(None, 0)] * 2


class Message:
    """A message that keeps its array as long as somebody keeps the message, as MPI's do."""

    def __init__(self, work, array):
        self.work, self.array = work, array

    def test(self):
        return self.work.test()

    def wait(self):
        return self.work.wait()


class Watched(Proxy):
    """A communicator that notes what is sent, without keeping it alive."""

    def __init__(self, comm):
        super().__init__(comm)
        self.sent = []

    def isend(self, array, dest, tag=0):
        self.sent.append(weakref.ref(array))
        return Message(self.comm.isend(array, dest, tag), array)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_after_a_step_nothing_that_was_sent_is_alive(schedule):
    def rank(comm):
        watched = Watched(comm)
        run = execute_rank(watched, make(schedule, 2, 4), 3)
        gc.collect()
        assert run.executor.peak_alive > 0
        return len(watched.sent), [reference() for reference in watched.sent if reference() is not None]

    assert run_local(2, rank) == [(4, [])] * 2
