"""Mistakes in tensor parallelism that the comparison with one device must catch."""

import re

import numpy as np
import pytest
from minipar.parallel.data import DistributedDataParallel
from tensor_cases import (
    one_device,
    train,
)

from minipar.autograd import linear
from minipar.nn import Dropout
from minipar.parallel.tensor import (
    RowParallelLinear,
    TensorGroup,
    TensorParallel,
    VocabParallelHead,
    leave,
    tensor_parallel,
)
from minipar.parallel.tensor import plan as plan_module
from minipar.train import trainer as trainer_module


def verdicts(flags="--global-batch 4 --steps 2", **layout):
    return [(verdict.passed, verdict.line) for *_, verdict, _ in train(flags, **layout)]


def failed(**layout):
    """Whether verify fails, and by far more than rounding: a mistake, not a bound that is a little too narrow."""
    found = verdicts(**layout)
    assert len(set(found)) == 1, "every rank hears the same"
    passed, line = found[0]
    difference = float(re.search(r"relative difference (\S+)", line)[1])
    assert passed or difference > 1e-6, line
    return not passed


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("answer", [0, 1])
def test_a_norm_that_counts_split_parameters_in_part_or_replicated_ones_t_times_is_caught(
    answer, sequence, stage, monkeypatch
):
    flags = f"--global-batch 2 --steps 1 --zero-stage {stage}"
    assert all(passed for passed, _ in verdicts(flags, dp=2, tp=2, sequence=sequence))
    right = DistributedDataParallel._is_split
    monkeypatch.setattr(DistributedDataParallel, "_is_split", lambda self, p: answer if self.tensor else right(self, p))
    for passed, line in verdicts(flags, dp=2, tp=2, sequence=sequence):
        assert not passed and "the gradient norms" in line


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicated_gradients_that_are_not_summed_under_sequence_parallelism_are_caught(stage, monkeypatch):
    monkeypatch.setattr(TensorParallel, "sum_partial", lambda self, parameters: None)
    flags = f"--global-batch 4 --steps 2 --zero-stage {stage}"
    assert failed(flags=flags, dp=2, tp=2, sequence=True)
    assert not failed(flags=flags, dp=2, tp=2, sequence=False)


def test_replicated_gradients_summed_without_need_are_caught(monkeypatch):
    """Without sequence parallelism they are whole already: t times too much, which the norm shows."""
    right = tensor_parallel

    def everything_partial(model, *arguments):
        tensor = right(model, *arguments)
        tensor.partial = set(model.parameters()) - set(tensor.cuts)
        return tensor

    monkeypatch.setattr(trainer_module, "tensor_parallel", everything_partial)
    assert failed(tp=2) and not failed(tp=2, sequence=True)


class BiasOnEveryRank(RowParallelLinear):
    def forward(self, x):
        return leave(linear(x, self.weight, self.bias), self.group, self.sequence)


def test_a_bias_on_every_rank_is_caught_after_the_first_step_moves_it(monkeypatch):
    """Biases start at zero, so outputs of the first step do not show it; its gradients do."""
    monkeypatch.setattr(plan_module, "RowParallelLinear", BiasOnEveryRank)
    assert failed(flags="--global-batch 4 --steps 1", tp=2, sequence=True)
    assert failed(flags="--global-batch 4 --steps 2", tp=2)


def test_a_forgotten_all_reduce_in_backward_is_caught(monkeypatch):
    """Column layers whose input's gradient is this rank's share: the loss of the first step is right all the same."""
    monkeypatch.setattr(TensorGroup, "start_sum", lambda self, x: lambda: x)
    monkeypatch.setattr(TensorGroup, "sum", lambda self, x: self.comm.all_reduce(x.copy(), algorithm=self.reduction))
    outcomes = train("--global-batch 4 --steps 1", tp=2)
    assert not outcomes[0][2].passed
    np.testing.assert_allclose(outcomes[0][1][0].loss, one_device("--global-batch 4 --steps 1", 2)[1][0], rtol=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_drawn_by_each_rank_for_what_it_holds_are_caught(sequence, monkeypatch):
    """MaskSlice forgotten: each rank's heads, or tokens, get the mask of the first ones."""
    right = Dropout.keep

    def keep(self, shape):
        window, self.mask_slice = self.mask_slice, None
        try:
            return right(self, shape)
        finally:
            self.mask_slice = window

    flags = "--global-batch 4 --steps 1 --dropout 0.1"
    assert not failed(flags=flags, tp=2, sequence=sequence)
    monkeypatch.setattr(Dropout, "keep", keep)
    assert failed(flags=flags, tp=2, sequence=sequence)


def test_heads_cut_across_q_k_and_v_are_caught(monkeypatch):
    """c_attn's columns cut as one stretch: rank 0 would hold all of q and half of k."""
    monkeypatch.setitem(plan_module.PLAN, "attn.c_attn", "column")
    assert failed(tp=2)


def test_padding_that_the_softmax_sees_is_caught(monkeypatch):
    """A head that takes the padded rows for tokens: each adds exp(0) to every softmax's sum."""
    monkeypatch.setattr(plan_module, "VocabParallelHead", lambda size, *rest: VocabParallelHead(10**9, *rest))
    assert failed(tp=2)
