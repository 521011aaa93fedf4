"""Claims about the function that applies all strategies: every argument arrives, and without any it is plain dp."""

from functools import partial

import numpy as np
import pytest
from training import MLP, gradient_of, small_gpt, text

from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.parallel import parallelize as module
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.groups import by_unit, groups_over
from minipar.parallel.parallelize import fully_shard, parallelize, shard
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import segment_groups
from minipar.parallel.placement import Partial

CLASSES = {0: "DistributedDataParallel", 1: "ZeroStage1", 2: "ZeroStage2", 3: "FullyShardedDataParallel"}


@pytest.mark.parametrize("stage", CLASSES)
def test_shard_hands_every_argument_to_the_class_of_its_stage(stage, monkeypatch):
    """Stages 1 to 3 have replicas of shards; stage 3 knows which segments follow one another."""
    given = []
    monkeypatch.setattr(module, CLASSES[stage], lambda *words, **named: given.append((words, named)))
    model, comm = MLP(), serial()
    named = {"before_reduce": print, "gradient_dtype": "float64", "reduce_dtype": "bfloat16"}
    named["groups"] = groups_over(comm, by_unit(model))
    every = {**named, "segment_lists": [[]], "replicas": 1 if stage == 0 else 7}
    shard(model, comm, stage, "ordered", **every)
    expected = dict(named)
    if stage >= 1:
        expected["replicas"] = 7
    if stage == 3:
        expected["segment_lists"] = [[]]
        expected["prefetch"] = True
    assert given == [((model, comm, "ordered"), expected)]


def test_fully_shard_prefetches_unless_it_is_told_not_to(monkeypatch):
    given = []
    monkeypatch.setattr(module, CLASSES[3], lambda *words, **named: given.append(named["prefetch"]))
    fully_shard(MLP(), serial())
    fully_shard(MLP(), serial(), prefetch=False)
    assert given == [True, False]


def test_without_arguments_it_is_plain_data_parallelism():
    def rank(comm):
        model = small_gpt()
        made = parallelize(model, DeviceMesh(comm, dp=2))
        assert type(made.ddp) is DistributedDataParallel and made.ddp.algorithm == "ring"
        assert made.tensor is None and made.pipeline is None
        return len(made.ddp.buckets), len(by_unit(model)), len(segment_groups(model))

    assert run_local(2, rank) == [(4, 4, 5)] * 2


def test_a_schedule_makes_no_pipeline_of_one_rank():
    made = parallelize(small_gpt(), DeviceMesh(serial()), schedule=make("1f1b", 1, 2))
    assert made.pipeline is None


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


@pytest.mark.parametrize("stage", CLASSES)
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
    with pytest.raises(UsageError, match='reduction "tree", but length = 0'):
        parallelize(small_gpt(), DeviceMesh(serial()), reduction="tree")
