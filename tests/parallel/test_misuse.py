"""Claims about mistakes that would train something else: a forgotten zero_grad, ranks that part, another axis."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
from training import MLP, Proxy, bits

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.parallel.parallelize import shard
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.zero_optimizer import ZeroOptimizer

STAGES = [0, 1, 2, 3]
FORGOTTEN = r"would add to the gradients of the last step: call optimizer.zero_grad\(\) after each step"
DRAW = np.random.Generator(np.random.Philox(31)).standard_normal
X, Y = DRAW((8, 4)), DRAW((8, 4))


def points(rank):
    """Two samples of this rank for an MLP."""
    draw = np.random.Generator(np.random.Philox(rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


class Split(Module):
    """A stage whose layers are split over tp."""

    def __init__(self, mesh, name=""):
        self.up = mp.ColumnParallelLinear(4, 6, mesh.tp, name=f"{name}up", dtype="float64", std=0.5)
        self.down = mp.RowParallelLinear(6, 4, mesh.tp, name=f"{name}down", dtype="float64", std=0.5)

    def forward(self, x):
        return self.down(mp.gelu(self.up(x)))

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2.0).sum()


def pipeline(comm, microbatches=1, **axes):
    mesh = DeviceMesh(comm, **axes)
    return PipelineModule([Split], mesh, num_microbatches=microbatches), mesh


def share(mesh):
    return X[mesh.dp.rank :: mesh.dp.size], Y[mesh.dp.rank :: mesh.dp.size]


# ---- zero_grad -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_a_step_without_zero_grad_is_refused(stage, size):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        ddp.loss(*points(comm.rank)).backward()
        optimizer.step()
        before = bits(ddp.state_dict())
        for context in (nullcontext, ddp.no_sync):
            with pytest.raises(RuntimeError, match=FORGOTTEN), context():
                ddp.loss(*points(comm.rank)).backward()
        optimizer.zero_grad()
        assert bits(ddp.state_dict()) == before
        ddp.loss(*points(comm.rank)).backward()
        optimizer.step()

    run_local(size, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_microbatches_are_legal_with_and_without_no_sync(stage):
    """At stages 2 and 3 without it, too; an evaluation after a step needs no zero_grad."""

    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        for _ in range(2):
            with ddp.no_sync() if stage < 2 else nullcontext():
                (ddp.loss(*points(comm.rank)) / 2).backward()
            (ddp.loss(*points(comm.rank + 5)) / 2).backward()
            optimizer.step()
            with mp.no_grad():
                ddp.loss(*points(comm.rank))
            optimizer.zero_grad()

    run_local(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_a_user_set_to_none_are_forgotten(stage):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        for _ in range(2):
            ddp.loss(*points(comm.rank)).backward()
            optimizer.step()
            for p in (*ddp.parameters(), *ddp.model.parameters()):
                p.grad = None

    run_local(2, rank)


@pytest.mark.parametrize("size", [1, 4])
def test_zero_optimizer_refuses_a_forgotten_zero_grad(size):
    def rank(comm):
        model, mesh = pipeline(comm, tp=2 if size == 4 else 1)
        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp)
        model(*share(mesh))
        optimizer.step()
        with pytest.raises(RuntimeError, match=FORGOTTEN):
            model(*share(mesh))

    run_local(size, rank)


@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_zero_optimizer_takes_zero_grad_of_itself_and_the_model(of):
    def rank(comm):
        model, mesh = pipeline(comm)
        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp)
        for _ in range(3):
            model(*share(mesh))
            model(*share(mesh))  # a second call of a step adds up
            optimizer.step()
            {"optimizer": optimizer, "model": model}[of].zero_grad()
        return model.parameters()[0].data.copy()

    assert np.array_equal(*run_local(2, rank))


def test_zero_optimizer_refuses_two_steps_of_one_backward():
    def rank(comm):
        model, mesh = pipeline(comm)
        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp)
        with pytest.raises(RuntimeError, match="without gradients"):
            optimizer.step()
        model(*share(mesh))
        optimizer.step()
        with pytest.raises(RuntimeError, match="twice for one backward"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="without gradients"):
            optimizer.step()

    run_local(2, rank)


# ---- ZeroOptimizer's settings ----------------------------------------------------------------------------------------


def trained(comm, schedule, make=ZeroOptimizer, algorithm="ordered"):
    """The first weight after a step at each of these learning rates."""
    model, mesh = pipeline(comm)
    optimizer = make(model.parameters(), SGD, mesh.dp, algorithm, lr=0.1)
    for lr in schedule:
        optimizer.lr = lr
        assert optimizer.lr == lr
        model(*share(mesh))
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()[0].data.copy()


def test_assigning_lr_to_zero_optimizer_is_the_schedule():
    start = run_local(2, trained, [])[0]
    once, then_none = (run_local(2, trained, rates)[0] for rates in ([0.1], [0.1, 0.0, 0.0]))
    assert np.array_equal(once, then_none) and not np.array_equal(once, start)
    assert not np.array_equal(run_local(2, trained, [0.1, 0.05])[0], once)


def test_zero_optimizer_refuses_settings_that_it_would_ignore():
    def rank(comm):
        model, mesh = pipeline(comm)
        optimizer = ZeroOptimizer(model.parameters(), AdamW, mesh.dp)
        with pytest.raises(UsageError, match="lr = nan"):
            optimizer.lr = float("nan")
        for name in ("betas", "eps", "weight_decay", "momentum", "learning_rate"):
            with pytest.raises(AttributeError, match=f"'ZeroOptimizer' object has no attribute '{name}'"):
                setattr(optimizer, name, 0.5)
        optimizer.optimizer.betas = (0.5, 0.5)
        assert optimizer.state_dict()["param_groups"][0]["betas"] == (0.5, 0.5)

    run_local(1, rank)


class Halving(SGD):
    """A user's own optimizer, with a setting that no other one has."""

    def __init__(self, parameters, lr, factor):
        super().__init__(parameters, lr)
        self.factor = factor

    def update(self, i, parameter, gradient):
        super().update(i, parameter, gradient * self.factor)


def test_a_setting_of_a_users_own_optimizer_is_refused_too():
    def rank(comm, factor):
        model = MLP()
        optimizer = ZeroOptimizer(model.parameters(), Halving, comm, lr=0.1, factor=0.5)
        with pytest.raises(AttributeError, match="'ZeroOptimizer' object has no attribute 'factor'"):
            optimizer.factor = factor
        optimizer.optimizer.factor = factor
        model.loss_sum(*points(comm.rank)).backward()
        optimizer.step()
        return bits(model.state_dict())

    half, same, none = (run_local(2, rank, factor) for factor in (0.5, 0.5, 0.0))
    assert half == same != none


class Algorithms(Proxy):
    """A communicator that records the algorithm of each reduce-scatter."""

    def __init__(self, comm):
        super().__init__(comm)
        self.seen = []

    def reduce_scatter(self, *arrays, algorithm="auto", **options):
        self.seen.append(algorithm)
        return self.comm.reduce_scatter(*arrays, algorithm=algorithm, **options)


@pytest.mark.parametrize("algorithm", ["ring", "ordered"])
def test_zero_optimizer_sums_by_the_algorithm_it_was_given(algorithm):
    def rank(comm):
        watched, model = Algorithms(comm), MLP()
        optimizer = ZeroOptimizer(model.parameters(), SGD, watched, algorithm, lr=0.1)
        model.loss_sum(*points(comm.rank)).backward()
        optimizer.step()
        return watched.seen

    assert run_local(3, rank) == [[algorithm]] * 3


def test_ordered_sums_of_zero_optimizer_are_one_devices_bits():
    def rank(comm):
        model = MLP()
        optimizer = ZeroOptimizer(model.parameters(), SGD, comm, "ordered", lr=0.1)
        model.loss_sum(*points(comm.rank)).backward()
        optimizer.step()
        return bits(model.state_dict())

    model = MLP()
    total = [np.zeros(p.shape) for p in model.parameters()]
    for other in range(3):
        model.zero_grad()
        model.loss_sum(*points(other)).backward()
        total = [before + p.grad for before, p in zip(total, model.parameters(), strict=True)]
    for p, gradient in zip(model.parameters(), total, strict=True):
        p.grad = gradient
    SGD(model.parameters(), lr=0.1).step()
    assert run_local(3, rank) == [bits(model.state_dict())] * 3


@pytest.mark.parametrize("algorithm", ["star", "auto", "mpi", mp.AdamW])
def test_zero_optimizer_refuses_sums_without_promised_bits(algorithm):
    with pytest.raises(ValueError, match="expected ring, ordered or tree"):
        run_local(2, lambda comm: ZeroOptimizer(MLP().parameters(), SGD, comm, algorithm))


# ---- axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "given"),
    [
        ({"dp": 2, "tp": 2}, "tp"),
        ({"dp": 2, "tp": 2}, "world"),
        ({"dp": 1, "tp": 2}, "tp"),
        ({"dp": 2, "tp": 1, "pp": 2}, "pp"),
        ({"dp": 4, "tp": 1}, "tp"),
    ],
)
def test_zero_optimizer_over_another_axis_is_refused_by_name(axes, given):
    def rank(comm):
        mesh = DeviceMesh(comm, **axes)
        stages = [lambda mesh: Split(mesh, "a"), lambda mesh: Split(mesh, "b")][: mesh.pp.size]
        model = PipelineModule(stages, mesh, num_microbatches=1)
        wrong = comm if given == "world" else getattr(mesh, given)
        says = f"ZeroOptimizer over {given}, ranks {wrong.ranks}: the replicas .* are those of mesh.dp"
        with pytest.raises(ValueError, match=re.sub(r"[\[\]]", ".", says) + ".*AdamW, mesh.dp"):
            ZeroOptimizer(model.parameters(), AdamW, wrong)
        ZeroOptimizer(model.parameters(), AdamW, mesh.dp)

    run_local(int(np.prod(list(axes.values()))), rank)


def test_the_world_is_fine_where_it_is_the_replicas():
    def rank(comm):
        model, _ = pipeline(comm, dp=2)
        ZeroOptimizer(model.parameters(), AdamW, comm)

    run_local(2, rank)


def test_ranks_with_other_parameters_are_no_replicas():
    def rank(comm):
        layer = mp.ColumnParallelLinear(4, 6, comm, name="up")
        ZeroOptimizer(layer.parameters(), AdamW, comm)

    with pytest.raises(ValueError, match="over world, whose ranks are no replicas: .* of rank 1 is not that of rank 0"):
        run_local(2, rank)


@pytest.mark.parametrize("first", ["wrapper", "ZeroOptimizer"])
def test_gradients_that_are_summed_already_are_not_summed_again(first):
    def rank(comm):
        model = MLP()
        remedy = "write AdamW.wrapper.parameters" if first == "wrapper" else "call its step.. alone"
        if first == "wrapper":
            shard(model, comm, 0)
        else:
            ZeroOptimizer(model.parameters(), AdamW, comm)
            with pytest.raises(ValueError, match=remedy):
                AdamW(model.parameters())
        with pytest.raises(ValueError, match=remedy):
            ZeroOptimizer(model.parameters(), AdamW, comm)

    run_local(2, rank)


def test_zero_optimizer_completes_gradients_that_tp_left_partial():
    """With sequence parallelism a rank's gradient of a LayerNorm covers its own tokens alone."""

    def make():
        config = mp.GPTConfig(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        return mp.GPT(config, dtype="float64")

    def rank(comm):
        mesh = DeviceMesh(comm, tp=2)
        model = make()
        tensor_parallel(model, mesh.tp, sequence=True)
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        tokens = np.arange(16).reshape(2, 8)
        model.loss(tokens, (tokens + 1) % 17).backward()
        optimizer.step()
        return model.ln_f.weight.data.copy()

    serial = make()
    tokens = np.arange(16).reshape(2, 8)
    serial.loss(tokens, (tokens + 1) % 17).backward()
    SGD(serial.parameters(), lr=0.1).step()
    for weight in run_local(2, rank):
        np.testing.assert_allclose(weight, serial.ln_f.weight.data, rtol=1e-12)


# ---- ranks that part -------------------------------------------------------------------------------------------------


def parted(comm, stage, **options):
    """Train a step, then change a value that this rank holds and another rank holds, too, on the last rank."""
    ddp = shard(MLP(), comm, stage, **options)
    optimizer = AdamW(ddp.parameters())
    ddp.loss(*points(comm.rank)).backward()
    optimizer.step()
    ddp.state_dict()
    if comm.rank == comm.size - 1:
        held = ddp.parameters() if stage else ddp.model.parameters()
        held[-1].data[-1] += 1e-9
    ddp.state_dict()


@pytest.mark.parametrize(("stage", "size", "options"), [(0, 2, {}), (0, 3, {}), (3, 4, {"replicas": 2})])
def test_ranks_that_have_parted_are_seen_at_state_dict(stage, size, options):
    with pytest.raises(ValueError, match="ranks' parameters have parted: .*every rank must do the same in every step"):
        run_local(size, parted, stage, **options)


@pytest.mark.parametrize("size", [2, 4])
def test_clipping_on_one_rank_alone_is_seen_at_state_dict(size):
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        ddp.loss(*points(comm.rank)).backward()
        if comm.rank == 0:
            ddp.clip_grad_norm(1e-3)
        optimizer.step()
        return ddp.state_dict()

    with pytest.raises(
        ValueError, match="first.weight of rank 1 is not that of rank 0; .*clip_grad_norm.* on one rank"
    ):
        run_local(size, rank)


def test_a_rank_of_a_pipeline_that_has_parted_is_seen():
    def rank(comm):
        model, mesh = pipeline(comm, dp=2, tp=2)
        model.state_dict()
        if mesh.dp.rank == 1 and mesh.tp.rank == 0:
            model.parameters()[0].data[0] += 1e-9
        model.state_dict()

    with pytest.raises(ValueError, match="have parted: stage0.up.weight of rank 2 is not that of rank 0"):
        run_local(4, rank)


# ---- names and batches over a pipeline -------------------------------------------------------------------------------


def test_layers_of_one_name_on_two_pipeline_ranks_are_refused():
    def rank(comm):
        PipelineModule([Split, Split], DeviceMesh(comm, pp=comm.size), num_microbatches=2)

    for size in (1, 2):
        with pytest.raises(UsageError, match='by the name "up.weight" and seed 0.*give each layer a name of its own'):
            run_local(size, rank)


def test_layers_of_one_name_are_refused_by_every_stage():
    class Two(Module):
        def __init__(self):
            self.one, self.two = Linear(3, 3, name="fc"), Linear(3, 3, name="fc")

    for stage in STAGES:
        with pytest.raises(UsageError, match='by the name "fc.weight"'):
            run_local(2, lambda comm, stage=stage: shard(Two(), comm, stage))


@pytest.mark.parametrize("axis", ["tp", "pp", "world"])
@pytest.mark.parametrize("which", ["x", "y"])
def test_batches_cut_by_another_axis_than_dp_are_refused(axis, which):
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2, pp=2)
        stages = [lambda mesh: Split(mesh, "a"), lambda mesh: Split(mesh, "b")]
        model = PipelineModule(stages, mesh, num_microbatches=2)
        cut = comm if axis == "world" else getattr(mesh, axis)
        wrong = {"x": X, "y": Y}[which][cut.rank :: cut.size]
        x, y = (wrong, Y[: len(wrong)]) if which == "x" else (X[: len(wrong)], wrong)
        model(x, y)

    with pytest.raises(
        ValueError, match=f"given different batches: {which} of rank .* cut the global batch by mesh.dp"
    ):
        run_local(8, rank)


def test_batches_are_compared_in_the_first_call_alone():
    def rank(comm):
        model, _ = pipeline(comm, tp=2)
        model(X, Y)
        model(X + comm.rank, Y)

    run_local(2, rank)


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), "1.0"])
@pytest.mark.parametrize("stage", [*STAGES, "pipeline"])
def test_a_norm_that_cannot_be_clipped_to_is_refused(stage, max_norm):
    """The gradients stay as they are."""

    def rank(comm):
        if stage == "pipeline":
            model, mesh = pipeline(comm)
            ZeroOptimizer(model.parameters(), AdamW, mesh.dp)
            model(*share(mesh))
        else:
            model = shard(MLP(), comm, stage)
            model.loss(*points(comm.rank)).backward()
        with pytest.raises(UsageError, match="max_norm = .*: expected a number larger than 0, or None"):
            model.clip_grad_norm(max_norm)
        assert model.clip_grad_norm(None) > 0

    run_local(2, rank)
