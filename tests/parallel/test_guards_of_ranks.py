"""Claims about refusals that ranks share: every rank raises one, whichever rank is wrong, and names all differences."""

import numpy as np
import pytest
from training import MLP

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import SGD, Linear, Module
from minipar.parallel.parallelize import shard
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.zero_optimizer import ZeroOptimizer


class Stage(Module):
    """A stage with two weights of these names."""

    def __init__(self, first, second):
        self.one, self.two = Linear(4, 4, name=first), Linear(4, 4, name=second)

    def forward(self, x):
        return self.two(self.one(x))

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2.0).sum()


def refused_on_every_rank(size, error, says, program):
    """Run a program whose error each rank must raise: a rank that does not is an error here."""

    def rank(comm):
        with pytest.raises(error, match=says):
            program(comm)

    run_local(size, rank)


def pipeline(comm):
    stages = [lambda mesh: Stage("a", "b"), lambda mesh: Stage("c", "d")]
    return PipelineModule(stages, DeviceMesh(comm, pp=comm.size), num_microbatches=2)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_rank_is_told_that_one_has_parted(wrong):
    def program(comm):
        ddp = shard(MLP(), comm, 0)
        if comm.rank == wrong:
            ddp.model.parameters()[-1].data += 1e-9
        ddp.state_dict()

    refused_on_every_rank(3, ValueError, "the ranks' parameters have parted", program)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_rank_is_told_that_one_is_no_replica(wrong):
    def program(comm):
        layer = Linear(4, 4, name="x", seed=1 if comm.rank == wrong else 0)
        ZeroOptimizer(layer.parameters(), SGD, comm, lr=0.1)

    refused_on_every_rank(3, ValueError, "whose ranks are no replicas", program)


@pytest.mark.parametrize("names", ["ab ca", "ab cb", "ab cd ec"])
def test_every_pipeline_rank_is_told_that_a_name_is_used_twice(names):
    def program(comm):
        stages = [lambda mesh, two=two: Stage(*two) for two in names.split()]
        PipelineModule(stages, DeviceMesh(comm, pp=comm.size), num_microbatches=2)

    refused_on_every_rank(len(names.split()), UsageError, "on the pipeline's ranks . and . are drawn by", program)


def test_a_state_is_refused_with_all_that_one_rank_sees():
    def program(comm):
        state = {"stage0.one.weight": np.ones(3), "stage2.x": np.ones(1)}
        pipeline(comm).load_state_dict(state)

    says = "missing stage0.one.bias; .*missing stage0.two.bias; stage0.one.weight has shape .*; unexpected stage2.x$"
    refused_on_every_rank(2, UsageError, says, program)


def test_the_first_array_that_differs_is_named():
    def program(comm):
        ddp = shard(MLP(), comm, 0)
        if comm.rank == 1:
            for p in ddp.model.parameters()[1:]:
                p.data += 1e-9
        ddp.state_dict()

    refused_on_every_rank(2, ValueError, "parted: first.bias of rank 1 is not that of rank 0", program)


def test_a_rows_input_without_dims_is_refused_by_name():
    def program(comm):
        mp.RowParallelLinear(8, 3, comm, name="row")(np.zeros(()))

    refused_on_every_rank(2, UsageError, "RowParallelLinear: x has 0 columns", program)
