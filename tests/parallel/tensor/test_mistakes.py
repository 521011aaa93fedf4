"""Mistakes in tensor parallelism that the comparison with one device must catch. Each is a trainer that makes one."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tensor_cases import one_device, train
from training import ForgetsTheSumOverTensorRanks, takes_all_for

from minipar.autograd import linear
from minipar.nn import Dropout
from minipar.parallel.placement import Partial, Replicate, Shard, update
from minipar.parallel.tensor.layers import Border, RowLinear
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.tensor.plan import PLAN
from minipar.train.trainer import Trainer


def verdicts(flags="--global-batch 4 --steps 2", **layout):
    return [(verdict.passed, verdict.line) for *_, verdict, _ in train(flags, **layout)]


def failed(**layout):
    """Whether verify fails, and by far more than rounding: a mistake, not a bound that is a little too narrow."""
    outcomes = verdicts(**layout)
    assert len(set(outcomes)) == 1, "every rank hears the same"
    passed, line = outcomes[0]
    if passed:
        return False
    found = re.search(r"they differ by (\S+), rounding explains (\S+)", line)
    if found:
        assert float(found[1]) > 1e6 * float(found[2]), line
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("placement", [Replicate, Shard])
def test_a_norm_that_takes_split_for_whole_or_whole_for_split(placement, sequence, stage):
    """Split parameters counted in part, or those that all ranks hold counted t times."""
    flags = f"--global-batch 2 --steps 1 --zero-stage {stage}"
    assert all(passed for passed, _ in verdicts(flags, dp=2, tp=2, sequence=sequence))
    for passed, line in verdicts(flags, dp=2, tp=2, sequence=sequence, kind=takes_all_for(placement)):
        assert not passed and "the gradient norm is" in line


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_partial_gradients_that_are_not_summed(stage):
    flags = f"--global-batch 4 --steps 2 --zero-stage {stage}"
    assert failed(flags=flags, dp=2, tp=2, sequence=True, kind=ForgetsTheSumOverTensorRanks)
    assert not failed(flags=flags, dp=2, tp=2, sequence=False, kind=ForgetsTheSumOverTensorRanks)


class EverythingPartial(Trainer):
    """Gradients of what all ranks hold are summed without need: they are whole without sequence parallelism."""

    def __init__(self, *args):
        super().__init__(*args)
        for p in self.model.parameters():
            if not isinstance(p.placement.tp, Shard):
                update(p, tp=Partial(p.placement.tp.rank, p.placement.tp.ranks))


def test_whole_gradients_summed_without_need():
    """They are t times too large, which the norm shows."""
    assert failed(tp=2, kind=EverythingPartial) and not failed(tp=2, sequence=True, kind=EverythingPartial)


class BiasOnEveryRank(RowLinear):
    def forward(self, x):
        return self.border.leave(linear(x, self.weight, self.bias))


class AddsEveryRanksBias(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        for parent in [part for block in self.model.h for part in (block.attn, block.mlp)]:
            parent.c_proj = BiasOnEveryRank(parent.c_proj, parent.c_proj.border)


def test_a_bias_on_every_rank_shows_once_the_first_step_moved_it():
    """Biases start at zero, so outputs of the first step do not show it; its gradients do."""
    assert failed(flags="--global-batch 4 --steps 1", tp=2, sequence=True, kind=AddsEveryRanksBias)
    assert failed(flags="--global-batch 4 --steps 2", tp=2, kind=AddsEveryRanksBias)


class OwnShareOnly(TensorGroup):
    """A group that forgets the sum which a column layer's backward starts."""

    def start_sum(self, x):
        return lambda: x


class ForgetsTheSumInBackward(Trainer):
    def __init__(self, *args):
        super().__init__(*args)
        for layer in [layer for block in self.model.h for layer in (block.attn.c_attn, block.mlp.c_fc)]:
            layer.border = Border(OwnShareOnly(layer.border.group.comm))


def test_a_forgotten_all_reduce_in_backward():
    """Column layers whose input's gradient is this rank's share: the loss of the first step is right all the same."""
    outcomes = train("--global-batch 4 --steps 1", tp=2, kind=ForgetsTheSumInBackward)
    assert not outcomes[0][2].passed
    np.testing.assert_allclose(outcomes[0][1][0].loss, one_device("--global-batch 4 --steps 1", 2)[1][0], rtol=1e-12)


class ForgetsTheMaskSlices(Trainer):
    """Each rank's heads, or tokens, get the dropout mask of the first ones."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in (self.model, *(part for block in self.model.h for part in (block.attn, block.mlp))):
            for dropout in vars(module).values():
                if isinstance(dropout, Dropout):
                    dropout.mask_slices.clear()


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_drawn_by_each_rank_for_what_it_holds(sequence):
    flags = "--global-batch 4 --steps 1 --dropout 0.1"
    assert not failed(flags=flags, tp=2, sequence=sequence)
    assert failed(flags=flags, tp=2, sequence=sequence, kind=ForgetsTheMaskSlices)


def test_heads_cut_across_q_k_and_v(monkeypatch):
    """c_attn's columns cut as one stretch: rank 0 would hold all of q and half of k."""
    monkeypatch.setitem(PLAN, "c_attn", replace(PLAN["c_attn"], groups=1))
    assert failed(tp=2)


class SeesThePadding(Trainer):
    """The head takes the padded rows for tokens: each adds exp(0) to every softmax's sum."""

    def __init__(self, *args):
        super().__init__(*args)
        self.model.project = partial(self.model.project, vocab_size=10**9)


def test_padding_that_the_softmax_sees():
    assert failed(tp=2, kind=SeesThePadding)
