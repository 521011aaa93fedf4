"""Claims about the function that applies all strategies of a run's flags to a serial model."""

import numpy as np
import pytest
from training import config_for, gradient_of, text

from minipar.comm import DeviceMesh, run_local, serial
from minipar.parallel.buckets import by_unit
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.pipeline.model import segment_groups
from minipar.parallel.placement import Partial
from minipar.train.parallelize import parallelize

SHAPE = "--layers 3 --hidden 12 --heads 2 --seq-len 8 --vocab-size 16 --dtype float64 --global-batch 2"


def made(flags, comm):
    """Return a model of these flags, and its strategies on the ranks of `comm`."""
    args = config_for(f"{SHAPE} {flags}")
    model = args.shape.build(dtype=args.dtype)
    return model, parallelize(model, DeviceMesh(comm, dp=args.dp, tp=args.tp), args)


def test_without_other_flags_it_is_plain_data_parallelism():
    def rank(comm):
        model, (ddp, _, tensor, pipeline, executor) = made("--dp 2", comm)
        assert type(ddp) is DistributedDataParallel and ddp.algorithm == "ring"
        assert tensor is None and pipeline is None and list(executor.stages) == [0]
        return len(ddp.buckets), len(by_unit(model)), len(segment_groups(model))

    assert run_local(2, rank) == [(4, 4, 5)] * 2


def test_one_device_of_a_pipelines_run_has_segments_as_units():
    """The norm is then summed in the pipeline's order: the head's norm is a unit of its own."""
    args = config_for(f"{SHAPE} --pp 2")
    model = args.shape.build(dtype=args.dtype)
    ddp, *_ = parallelize(model, DeviceMesh(serial()), args)
    assert [list(bucket.parameters) for bucket in reversed(ddp.buckets)] == segment_groups(model)


@pytest.mark.parametrize("flag", ["", "--sequence-parallel"])
def test_tp_ranks_share_tokens_only_where_they_are_asked_to(flag):
    def rank(comm):
        _, (ddp, *_) = made(f"--tp 2 {flag}", comm)
        return any(isinstance(p.placement.tp, Partial) for p in ddp.parameters())

    assert run_local(2, rank) == [bool(flag)] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_a_ranks_own_tokens_are_summed_as_trees(stage):
    """A script may apply the strategies by itself, without the trainer, which adds up the microbatches as a tree."""

    def rank(comm, reduction):
        _, (ddp, *_) = made(f"--tp 2 --sequence-parallel --zero-stage {stage} --reduction {reduction}", comm)
        ddp.loss(*text([0, 1], vocab=16)).backward()
        return gradient_of(ddp)

    ring, tree = [run_local(2, rank, reduction)[0] for reduction in ("ring", "tree")]
    for name, gradient in ring.items():
        np.testing.assert_allclose(tree[name], gradient, rtol=1e-12, atol=1e-15, err_msg=name)
