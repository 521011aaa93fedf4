"""Claims about a rank's stages of a model: how it is cut, a backward in halves, and the tied embedding's two ends."""

import gc
import itertools
import random
import weakref

import numpy as np
import pytest
from pipeline_cases import SCALE, TEXT, B, H, T, execute_rank, gpt, gradients
from training import Proxy, small_gpt

from minipar.autograd import Tensor, flop_counter
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.more.llama import Llama, LlamaConfig
from minipar.nn import GPT, GPTConfig
from minipar.parallel.pipeline.model import PipelineParallel, balanced_cuts, cut
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineStage

# ---- cutting ---------------------------------------------------------------------------------------------------------


def largest(costs, counts):
    stops = list(itertools.accumulate(counts))
    return max(sum(costs[a:b]) for a, b in zip([0, *stops], stops, strict=False))


def test_balanced_cuts_are_the_best_of_all_cuts():
    rng = random.Random(6)
    for _ in range(60):
        blocks = rng.randint(1, 8)
        costs = [rng.choice([0, 1, 2, 5]), *(rng.randint(1, 9) for _ in range(blocks)), rng.choice([0, 3, 20])]
        for stages in range(1, blocks + 1):
            counts = balanced_cuts(costs, stages)
            assert len(counts) == stages and sum(counts) == len(costs)
            inner = [counts[0] - 1, *counts[1:-1], counts[-1] - 1] if stages > 1 else [counts[0] - 2]
            assert min(inner) >= 1  # a block at least, besides the embedding or the head
            every = itertools.combinations(range(2, blocks + 1), stages - 1)
            cuts = [[b - a for a, b in itertools.pairwise([0, *stops, len(costs)])] for stops in every]
            assert largest(costs, counts) == min(largest(costs, each) for each in cuts)


def test_each_parts_cost_is_its_operations_per_token():
    model, x = GPT(GPTConfig(vocab_size=50, n_positions=T, n_embd=H, n_layer=6, n_head=2)), TEXT[0, :, :-1]
    for segment, cost in zip(model.segments, model.config.segment_flops(T), strict=True):
        operations = []
        with flop_counter(operations.append):
            x = segment.run(x)
        assert sum(operations) == cost * TEXT[0, :, :-1].size


def test_each_stage_has_a_layer_and_segments_keep_their_order():
    model = gpt(3)
    with pytest.raises(UsageError, match=r"3 .* 4"):
        balanced_cuts(model.config.segment_flops(T), 4)
    names = [[segment.name for segment in stage] for stage in cut(model, [2, 3])]
    assert names == [["embedding", "h.0"], ["h.1", "h.2", "head"]]


# ---- a stage's backward ----------------------------------------------------------------------------------------------


def test_a_backward_in_halves_gives_the_input_gradient_first():
    dx, weights = [], []
    for halves in (False, True):
        model = gpt(1)
        stage = PipelineStage(model.segments[1:])
        x = np.random.Generator(np.random.Philox(3)).standard_normal((B, T, H))
        x = Tensor(x, requires_grad=True)
        stage.forward(0, x, lambda logits, model=model: model.criterion(logits, TEXT[0, :, 1:]))
        if halves:
            dx.append(stage.backward_input(0, SCALE))
            assert model.h[0].mlp.c_fc.weight.grad is None  # the expensive products are still to come
            assert not stage.alive
            stage.backward_weight(0)
        else:
            dx.append(stage.backward(0, SCALE))
        weights.append({name: g.tobytes() for name, g in gradients(model).items() if g is not None})
    assert dx[0].tobytes() == dx[1].tobytes() and weights[0] == weights[1]
    assert len(weights[0]) == 12 + 2 + 1  # block, last norm, head


# ---- the tied embedding's two ends -----------------------------------------------------------------------------------

VALUES = 17 * 13  # of the token embedding


@pytest.mark.parametrize("p", [2, 3])
def test_the_tied_embedding_and_its_gradient_change_ranks(p):
    """Its gradient is added to the lookup's on the first rank; ranks between send and hold neither."""
    gradient = np.arange(17 * 13, dtype=np.float64).reshape(17, 13)

    def rank(comm):
        model = small_gpt()
        pipeline = PipelineParallel(model, comm, make("1f1b", p, 2), 8)
        if comm.rank == p - 1:
            model.head_weight.grad = gradient.copy()
        comm.traffic.reset()
        pipeline.fetch_tied_gradient()
        pipeline.send_tied_weight(lambda parameter: np.full(parameter.shape, 7.0))
        found = None if model.head_weight.grad is None else model.head_weight.grad.tobytes()
        return found, comm.traffic.bytes(), set(model.token_embedding.data.ravel().tolist()) == {7.0}

    first, *between, last = run_local(p, rank)
    assert first == (gradient.tobytes(), 8 * VALUES, False)
    assert between == [(None, 0, False)] * (p - 2)
    assert last == (gradient.tobytes(), 8 * VALUES, True)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_head_of_its_own_or_on_the_same_rank_is_not_sent(schedule):
    """Llama's head is no token embedding, and a V has both ends of the model on rank 0."""

    def rank(comm):
        model = small_gpt(layers=4) if schedule == "zbv" else Llama(LlamaConfig(17, 8, 12, 4, 2, 2, 8), dtype="float64")
        pipeline = PipelineParallel(model, comm, make(schedule, 2, 4), 8)
        comm.traffic.reset()
        pipeline.fetch_tied_gradient()
        pipeline.send_tied_weight(lambda parameter: pytest.fail("nobody needs it"))
        return comm.traffic.bytes()

    assert run_local(2, rank) == [0, 0]


# ---- what was sent ---------------------------------------------------------------------------------------------------


class Message:
    """A message that keeps its array as long as somebody keeps the message, as MPI's do."""

    def __init__(self, work, array):
        self.work, self.array = work, array

    def test(self):
        return self.work.test()

    def wait(self):
        return self.work.wait()


class Watched(Proxy):
    """A communicator that notes its messages, and at each send how many arrays that were sent are still alive."""

    def __init__(self, comm):
        super().__init__(comm)
        self.sent, self.alive, self.works = [], [], []

    def isend(self, array, dest, tag=0):
        self.alive.append(sum(reference() is not None for reference in self.sent))
        self.sent.append(weakref.ref(array))
        self.works.append(self.comm.isend(array, dest, tag))
        return Message(self.works[-1], array)


@pytest.mark.parametrize("p", [2, 3])
def test_a_rank_frees_what_it_sent_once_it_is_delivered(p):
    """In 1F1B a rank sends no further before what it sent p microbatches ago has been used; the graph holds as many.
    A step ends when all is delivered, and then nothing of it is alive.
    """

    def rank(comm):
        watched = Watched(comm)
        execute_rank(watched, make("1f1b", p, 16), 3)
        assert {work.done for work in watched.works} == {True}
        return max(watched.alive), sum(reference() is not None for reference in watched.sent)

    gc.disable()
    try:
        found = run_local(p, rank)
    finally:
        gc.enable()
    assert max(most for most, _ in found) <= 2 * p and {left for _, left in found} == {0}
