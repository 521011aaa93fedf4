"""Claims about what wrappers promise in cases that are rarely met: nested, on a pipeline, after an error, resumed."""

import numpy as np
import pytest
from training import MLP, bits, small_gpt

from minipar.comm import DeviceMesh, run_local
from minipar.nn import AdamW, Module, Parameter
from minipar.parallel.groups import groups_over
from minipar.parallel.parallelize import shard
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.stage import PipelineParallel

STAGES = [0, 1, 2, 3]


def points(step, rank):
    draw = np.random.Generator(np.random.Philox(10 * step + rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


# ---- no_sync ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_inside_no_sync_ends_with_the_outer_one(stage, nested):
    """Nothing is sent until the outermost block has ended, also if a block inside it ends, or fails."""

    def rank(comm):
        ddp = shard(MLP(), comm, stage, "ordered")
        operations = "all_reduce" if stage == 0 else "reduce_scatter"
        with ddp.no_sync():
            if nested:
                with ddp.no_sync():
                    pass
                with pytest.raises(ZeroDivisionError), ddp.no_sync():
                    1 / 0  # noqa: B018
            loss = ddp.loss(*points(0, comm.rank))
            before = comm.traffic.bytes(operations)
            loss.backward()
            assert comm.traffic.bytes(operations) == before
        ddp.loss(*points(1, comm.rank)).backward()
        return ddp.clip_grad_norm(None)

    norms = run_local(2, rank)
    assert norms[0] == norms[1]


# ---- on a pipeline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["clip_grad_norm", "state_dict"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapper_on_a_pipeline_names_the_functions_over_axes(stage, call):
    """It sees one stage alone, so its norm and its state would be those of a part; no rank may compute them."""

    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, pp=2)
        model = small_gpt(deferred=True)
        pipeline = PipelineParallel(model, mesh.pp, make("1f1b", 2, 2), 8)
        runs = [held.segments for held in pipeline.stages.values()]
        ddp = shard(model, mesh.dp, stage, groups=groups_over(mesh.dp, pipeline.groups), segment_lists=runs)
        function = "grad_norm.clip_grad_norm" if call == "clip_grad_norm" else "state.gather_state"
        with pytest.raises(ValueError, match=f"pipeline parallelism .* call minipar.parallel.{function}"):
            ddp.clip_grad_norm(1.0) if call == "clip_grad_norm" else ddp.state_dict()

    run_local(4, rank)


# ---- after an error --------------------------------------------------------------------------------------------------


class Fails(MLP):
    """A model that fails in the middle of its forward if its input holds a NaN."""

    def forward(self, x):
        hidden = self.first(x)
        if np.isnan(x).any():
            raise FloatingPointError("a NaN")
        return self.second(hidden)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["loss", "call"])
def test_a_step_after_an_error_inside_a_unit_is_as_without_it(stage, way):
    """Also where the unit's parameters were gathered for the forward that failed."""

    def rank(comm, fails):
        ddp = shard(Fails(), comm, stage, "ordered")
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        for step in range(3):
            x, y = points(step, comm.rank)
            if fails:
                with pytest.raises(FloatingPointError):
                    ddp.loss(x * np.nan, y) if way == "loss" else ddp(x * np.nan)
            ddp.loss(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(ddp.state_dict())

    assert run_local(2, rank, True) == run_local(2, rank, False)


# ---- more ranks than elements ----------------------------------------------------------------------------------------


class Three(Module):
    """A model of three elements."""

    def __init__(self):
        self.weight = Parameter(np.array([0.5, -1.0, 2.0]))

    def loss_sum(self, x, y):
        return ((x * self.weight - y) ** 2.0).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_elements_clip_by_the_same_norm(stage):
    def rank(comm):
        ddp = shard(Three(), comm, stage)
        ddp.loss(np.ones((1, 3)), np.zeros((1, 3))).backward()
        norm = ddp.clip_grad_norm(0.5)
        AdamW(ddp.parameters()).step()
        return norm

    gradient = 2 * np.array([0.5, -1.0, 2.0]) / 3
    assert run_local(5, rank) == [pytest.approx(np.linalg.norm(gradient), rel=1e-14)] * 5


# ---- an optimizer's state --------------------------------------------------------------------------------------------


def train(comm, stage, steps, weights=None, states=None, make=MLP):
    """Train some steps, from a state if one is given; return the whole state and the optimizer's."""
    model = make()
    if weights is not None:
        model.load_state_dict(weights)
    ddp = shard(model, comm, stage)
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    if states is not None:
        optimizer.load_state_dict(states[comm.rank])
    for step in steps:
        ddp.loss(*points(step, comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_continues_from_its_own_optimizer_state(stage):
    halves = run_local(2, train, stage, range(3))
    states = [state for _, state in halves]
    resumed = run_local(2, train, stage, range(3, 6), halves[0][0], states)
    assert bits(resumed[0][0]) == bits(run_local(2, train, stage, range(6))[0][0])


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_state_of_other_elements_is_refused(stage):
    """At stage 0 all ranks hold the same; any rank's state fits."""
    states = [state for _, state in run_local(2, train, stage, range(3))]
    swapped = states[::-1]
    if stage == 0:
        run_local(2, train, stage, range(1), None, swapped)
        return
    with pytest.raises(ValueError, match="load it on the rank that saved it|optimizer state of . parameters"):
        run_local(2, train, stage, range(1), None, swapped)


def test_shards_of_one_size_are_told_apart():
    """Two ranks' halves of one parameter have the same shapes; what they hold is compared, too."""

    class One(Module):
        def __init__(self):
            self.weight = Parameter(np.ones((3, 1)))
            self.other = Parameter(np.ones((3, 1)))

        def loss_sum(self, x, y):
            return ((x @ (self.weight * self.other) - y) ** 2.0).sum()

    states = [state for _, state in run_local(2, train, 1, range(3), make=One)]
    run_local(2, train, 1, range(1), None, states, make=One)
    with pytest.raises(
        ValueError, match=r"(weight|other)\[0:3\], but .*holds .*\[0:3\]: load it on the rank that saved it"
    ):
        run_local(2, train, 1, range(1), None, states[::-1], make=One)
