"""Claims about the function that applies all strategies: without arguments it is plain data parallelism."""

from functools import partial

import numpy as np
import pytest
from training import gradient_of, small_gpt, text

from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.groups import by_unit
from minipar.parallel.parallelize import parallelize
from minipar.parallel.pipeline.stage import segment_groups
from minipar.parallel.placement import Partial


def test_without_arguments_it_is_plain_data_parallelism():
    def rank(comm):
        model = small_gpt()
        made = parallelize(model, DeviceMesh(comm, dp=2))
        assert type(made.ddp) is DistributedDataParallel and made.ddp.algorithm == "ring"
        assert made.tensor is None and made.pipeline is None
        return len(made.ddp.buckets), len(by_unit(model)), len(segment_groups(model))

    assert run_local(2, rank) == [(4, 4, 5)] * 2


def test_units_may_be_segments_as_in_a_pipeline():
    """The norm is then summed in the pipeline's order: the head's norm is a unit of its own."""
    model = small_gpt()
    made = parallelize(model, DeviceMesh(serial()), segments_as_units=True)
    assert [list(bucket.parameters) for bucket in reversed(made.ddp.buckets)] == segment_groups(model)


@pytest.mark.parametrize("options", [{}, {"sequence": True}])
def test_tp_ranks_share_tokens_only_where_they_are_asked_to(options):
    def rank(comm):
        model = GPT(GPTConfig(vocab_size=17, n_positions=8, n_embd=12, n_layer=1, n_head=2))
        made = parallelize(model, DeviceMesh(comm, tp=2), **options)
        return any(isinstance(p.placement.tp, Partial) for p in made.ddp.parameters())

    assert run_local(2, rank) == [bool(options)] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_a_ranks_own_tokens_are_summed_as_trees(stage):
    """A script may apply the strategies by itself, without the trainer, which adds up the microbatches as a tree."""

    def rank(reduction, comm):
        model = GPT(GPTConfig(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2), dtype="float64")
        mesh = DeviceMesh(comm, tp=2)
        options = {"zero_stage": stage, "sequence": True, "length": 8}
        ddp = parallelize(model, mesh, reduction=reduction, **options).ddp
        ddp.loss(*text([0, 1], vocab=16)).backward()
        return gradient_of(ddp)

    ring, tree = [run_local(2, partial(rank, reduction))[0] for reduction in ("ring", "tree")]
    for name, gradient in ring.items():
        np.testing.assert_allclose(tree[name], gradient, rtol=1e-12, atol=1e-15, err_msg=name)


def test_sums_as_trees_need_the_length_of_the_sequences():
    """Each leaf has as many of a sequence's tokens."""
    with pytest.raises(UsageError, match="length = 0"):
        parallelize(small_gpt(), DeviceMesh(serial()), reduction="tree")
