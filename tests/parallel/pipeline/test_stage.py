"""Claims about pipeline stages: how a model is cut by cost, and a stage's backward whole or in halves."""

import itertools
import random

import numpy as np
import pytest
from pipeline_cases import SCALE, TEXT, B, H, T, gpt, gradients
from training import small_gpt

from minipar.autograd import Tensor, flop_counter
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineParallel, PipelineStage, balanced_cuts, cut


def test_a_backward_in_halves_gives_the_input_gradient_first():
    dx, weights = [], []
    for halves in (False, True):
        model = gpt(1)
        stage = PipelineStage(model.segments[1:])
        x = np.random.Generator(np.random.Philox(3)).standard_normal((B, T, H))
        x = Tensor(x, requires_grad=True)
        stage.forward(0, x, lambda logits, model=model: model.criterion(logits, TEXT[0, :, 1:]))
        matrix = model.h[0].mlp.c_fc.weight
        if halves:
            dx.append(stage.backward_input(0, SCALE))
            assert matrix.grad is None and model.head_weight.grad is None  # the expensive products are still to come
            assert not stage.alive
            stage.backward_weight(0)
        else:
            dx.append(stage.backward(0, SCALE))
        weights.append(gradients(model))
    assert dx[0].tobytes() == dx[1].tobytes()
    for name, gradient in weights[0].items():
        other = weights[1][name]
        assert (gradient is None and other is None) or gradient.tobytes() == other.tobytes()
    assert sum(gradient is not None for gradient in weights[0].values()) == 12 + 2 + 1  # block, last norm, head


# -- cutting -----------------------------------------------------------------------------------------------------------


def largest(costs, counts):
    stops = list(itertools.accumulate(counts))
    return max(sum(costs[a:b]) for a, b in zip([0, *stops], stops, strict=False))


def test_balanced_cuts_are_the_best_of_all_cuts():
    rng = random.Random(6)
    for _ in range(200):
        blocks = rng.randint(1, 8)
        costs = [rng.choice([0, 1, 2, 5]), *(rng.randint(1, 9) for _ in range(blocks)), rng.choice([0, 3, 20])]
        for stages in range(1, blocks + 1):
            counts = balanced_cuts(costs, stages)
            assert len(counts) == stages and sum(counts) == len(costs)
            inner = [counts[0] - 1, *counts[1:-1], counts[-1] - 1] if stages > 1 else [counts[0] - 2]
            assert min(inner) >= 1  # a block at least, besides the embedding or the head
            best = min(
                largest(costs, [b - a for a, b in itertools.pairwise([0, *stops, len(costs)])])
                for stops in itertools.combinations(range(2, blocks + 1), stages - 1)
            )
            assert largest(costs, counts) == best


def test_each_parts_cost_is_its_operations_per_token():
    model, x = GPT(GPTConfig(vocab_size=50, n_positions=T, n_embd=H, n_layer=6, n_head=2)), TEXT[0, :, :-1]
    for segment, cost in zip(model.segments, model.config.segment_flops(T), strict=True):
        operations = []
        with flop_counter(operations.append):
            x = segment.run(x)
        assert sum(operations) == cost * TEXT[0, :, :-1].size


def test_a_large_head_takes_blocks_away_from_its_stage():
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 0], 3) == [3, 2, 3]
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 2], 3) == [3, 3, 2]
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 1, 100], 2)[-1] == 2
    assert balanced_cuts([0, 1, 1, 1, 1, 1, 0], 2) == [3, 4]  # of equally good cuts, that with the shorter first stages


def test_fewer_layers_than_stages_and_cuts_that_do_not_fit():
    model = gpt(3)
    with pytest.raises(UsageError, match="layers 3 are fewer than the pipeline's 4 stages"):
        balanced_cuts(model.config.segment_flops(T), 4)
    for counts in ([2, 2], [5, 1], [6, -1], [5, 0]):
        with pytest.raises(
            UsageError, match=rf"stages of \[{counts[0]}, {counts[1]}\] segments do not cut the model's 5 segments"
        ):
            cut(model, counts)
    names = [[segment.name for segment in stage] for stage in cut(model, [2, 3])]
    assert names == [["embedding", "h.0"], ["h.1", "h.2", "head"]]


@pytest.mark.parametrize("p", [2, 3])
def test_the_heads_gradient_of_the_embedding_goes_to_the_first(p):
    """There it is added to the lookup's; the ranks between have neither."""
    gradient = np.arange(17 * 13, dtype=np.float64).reshape(17, 13)

    def rank(comm):
        model = small_gpt()
        pipeline = PipelineParallel(model, comm, make("1f1b", p, 2), 8)
        if comm.rank == p - 1:
            model.head_weight.grad = gradient.copy()
        pipeline.fetch_tied_gradient()
        return None if model.head_weight.grad is None else model.head_weight.grad.tobytes()

    assert run_local(p, rank) == [gradient.tobytes(), *[None] * (p - 2), gradient.tobytes()]
