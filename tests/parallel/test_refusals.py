"""Claims about models and layers that a user makes parallel: what does not divide is refused with the equation."""

import numpy as np
import pytest

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Linear, Llama, LlamaConfig, Mixtral, MixtralConfig, Module
from minipar.parallel.context import context_parallel
from minipar.parallel.expert import expert_parallel
from minipar.parallel.parallelize import parallelize, shard
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.tensor.user_layers import ColumnParallelLinear, RowParallelLinear

SHAPE = GPTConfig(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=4)


class Last(Module):
    def __init__(self, mesh=None, name="last"):
        self.linear = Linear(4, 2, name=name)

    def forward(self, x):
        return self.linear(x)

    def loss_sum(self, x, y):
        return ((self.linear(x) - y) ** 2.0).sum()


class Outer(Module):
    """A model of one's own, which has another one inside."""

    def __init__(self, model):
        self.inner = model

    def loss_sum(self, x, y):
        return self.inner.loss_sum(x, y)


@pytest.mark.parametrize(
    ("layer", "sizes", "groups", "equation"),
    [
        (ColumnParallelLinear, (4, 9), 1, r"up: n_out/\(groups\*tp\) = 9/2 is not a whole number"),
        (ColumnParallelLinear, (4, 9), 3, r"up: n_out/\(groups\*tp\) = 9/6 is not a whole number"),
        (RowParallelLinear, (9, 4), None, r"up: n_in/tp = 9/2 is not a whole number"),
    ],
)
def test_a_layer_that_ranks_cannot_share_is_refused(layer, sizes, groups, equation):
    def rank(comm):
        options = {} if groups is None else {"groups": groups}
        with pytest.raises(UsageError, match=equation):
            layer(*sizes, comm, name="up", **options)

    run_local(2, rank)


def test_experts_that_ranks_cannot_share_are_refused():
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, ep=2)
        config = MixtralConfig(11, 16, 12, 2, 4, 2, 8, num_local_experts=3, num_experts_per_tok=2)
        model = Mixtral(config)
        with pytest.raises(UsageError, match="experts/ep = 3/2 is not a whole number"):
            expert_parallel(model, mesh.ep, mesh.edp)

    run_local(2, rank)


def test_fewer_samples_than_microbatches_are_refused():
    def rank(comm):
        stages = [lambda mesh: Last(mesh, "first"), Last]
        model = PipelineModule(stages, DeviceMesh(comm, pp=2), num_microbatches=3)
        with pytest.raises(UsageError, match="2 samples are fewer than 3 microbatches"):
            model(np.zeros((2, 4)), np.zeros((2, 2)))

    run_local(2, rank)


def test_stages_that_ranks_cannot_share_are_refused():
    def rank(comm):
        with pytest.raises(UsageError, match=r"stages/\(stages of 1f1b on pp = 2\) = 3/2 is not a whole number"):
            PipelineModule([Last, Last, Last], DeviceMesh(comm, pp=2), num_microbatches=2)

    run_local(2, rank)


@pytest.mark.parametrize("function", ["clip_grad_norm", "state_dict"])
def test_a_wrapper_refuses_what_needs_other_axes_too(function):
    """Over dp alone the norm and the state would lack what the ranks of tp have."""

    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        model = GPT(SHAPE)
        tensor_parallel(model, mesh.tp)
        wrapped = shard(model, mesh.dp, 0)
        with pytest.raises(ValueError, match="parallelism has placed this model too: call minipar.parallel"):
            wrapped.clip_grad_norm(1.0) if function == "clip_grad_norm" else wrapped.state_dict()

    run_local(4, rank)


# ---- the order and the ranks of strategies ---------------------------------------------------------------------------

EXPERTS = MixtralConfig(11, 16, 12, 2, 4, 2, 8, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", [tensor_parallel, context_parallel])
def test_a_model_is_split_once_by_each_strategy(strategy, size):
    def rank(comm):
        model = GPT(SHAPE)
        strategy(model, comm)
        with pytest.raises(UsageError, match=f"{strategy.__name__} has split this model already: call it once"):
            strategy(model, comm)

    run_local(size, rank)


def test_a_strategy_that_was_refused_has_split_nothing():
    """The remedy may follow in the same program, on the same model."""

    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), GPT(SHAPE, dropout=0.1)
        with pytest.raises(UsageError, match="expert_parallel: GPT has no experts"):
            expert_parallel(model, mesh.ep, mesh.edp)
        with pytest.raises(UsageError, match="dropout = 0.1"):
            context_parallel(model, comm, method="ring")
        context_parallel(model, comm, method="ulysses")
        odd = GPT(GPTConfig(vocab_size=11, n_positions=8, n_embd=12, n_layer=1, n_head=3))
        for _ in range(2):
            with pytest.raises(UsageError, match="heads/tp = 3/2"):
                tensor_parallel(odd, comm)

    run_local(2, rank)


def test_experts_are_shared_out_once():
    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), Mixtral(EXPERTS)
        expert_parallel(model, mesh.ep, mesh.edp)
        with pytest.raises(UsageError, match="expert_parallel has split this model already"):
            expert_parallel(model, mesh.ep, mesh.edp)

    run_local(2, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("give", ["model", "wrapper"])
def test_a_wrapped_model_is_not_split_any_more(stage, give):
    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), Mixtral(EXPERTS)
        wrapper = shard(model, comm, stage)
        given = {"model": model, "wrapper": wrapper}[give]
        for split in (tensor_parallel, context_parallel, lambda m, comm: expert_parallel(m, mesh.ep, mesh.edp)):
            with pytest.raises(UsageError, match="_parallel of a model that is wrapped already: call mp.*first, then"):
                split(given, comm)

    run_local(2, rank)


def test_a_pipeline_is_not_split_any_more():
    def rank(comm):
        mesh = DeviceMesh(comm, pp=2)
        pipeline = PipelineModule(
            [lambda mesh, i=i: Linear(4, 4, name=f"fc{i}") for i in range(2)], mesh, num_microbatches=2
        )
        for split in (tensor_parallel, context_parallel, lambda m, comm: expert_parallel(m, mesh.ep, mesh.edp)):
            with pytest.raises(UsageError, match="_parallel of a model that is wrapped already: call mp.*first, then"):
                split(pipeline, mesh.dp)

    run_local(2, rank)


@pytest.mark.parametrize("order", [[tensor_parallel, context_parallel], [context_parallel, tensor_parallel]])
def test_tensor_and_context_parallelism_share_no_ranks(order):
    first, second = order

    def rank(comm):
        model = GPT(SHAPE)
        first(model, comm)
        says = (
            f"{second.__name__} over ranks .*: {first.__name__} has split this model over ranks .*mesh.tp and mesh.cp"
        )
        with pytest.raises(UsageError, match=says):
            second(model, comm)

    run_local(2, rank)


def test_tensor_parallelism_and_experts_share_no_ranks():
    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), Mixtral(EXPERTS)
        tensor_parallel(model, comm)
        with pytest.raises(UsageError, match="expert_parallel over ranks .*: tensor_parallel has split this model"):
            expert_parallel(model, mesh.ep, mesh.edp)

    run_local(2, rank)


def test_every_strategy_on_axes_of_its_own_is_fine():
    def rank(comm):
        mesh, model = DeviceMesh(comm, dp=1, tp=2, cp=2, ep=2), Mixtral(EXPERTS)
        tensor = tensor_parallel(model, mesh.tp)
        experts = expert_parallel(model, mesh.ep, mesh.edp)
        context_parallel(model, mesh.cp)
        shard(model, mesh.dp_cp, 0, groups=experts.groups(mesh.dp_cp), before_reduce=tensor.sum_partial)

    run_local(4, rank)


def test_a_model_without_experts_cannot_share_them_out():
    def rank(comm):
        mesh = DeviceMesh(comm, ep=2)
        with pytest.raises(UsageError, match="expert_parallel: GPT has no experts to share out; give an mp.Mixtral"):
            expert_parallel(GPT(SHAPE), mesh.ep, mesh.edp)

    run_local(2, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", ["edp", "ep", "dp"])
def test_shared_experts_are_wrapped_over_all_their_ranks(axis, stage):
    """Over edp or ep alone the other parameters' gradients would lack the tokens of some ranks."""

    def rank(comm):
        mesh, model = DeviceMesh(comm, dp=2, cp=2, ep=2), Mixtral(EXPERTS)
        experts = expert_parallel(model, mesh.ep, mesh.edp)
        comm = {"edp": mesh.edp, "ep": mesh.ep, "dp": mesh.dp}[axis]
        with pytest.raises(UsageError, match="ep = 2 and edp = 2 hold different tokens; wrap it over mesh.dp_cp"):
            shard(model, comm, stage, groups=experts.groups(comm))
        shard(model, mesh.dp_cp, stage, groups=experts.groups(mesh.dp_cp))

    run_local(4, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_without_groups_of_their_own_are_refused(stage):
    """Each rank's gradient of them holds other ranks' tokens already: a sum over all ranks would count them twice."""

    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), Mixtral(EXPERTS)
        expert_parallel(model, mesh.ep, mesh.edp)
        with pytest.raises(
            UsageError, match=r"is an expert's, .*: write experts = .*groups=experts.groups\(mesh.dp_cp"
        ):
            shard(model, mesh.dp_cp, stage)

    run_local(2, rank)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrapper_has_all_ranks_that_share_tokens(stage, inside):
    """Over mesh.dp alone the gradients would lack the tokens of other ranks."""

    def rank(comm):
        mesh, model = DeviceMesh(comm, dp=2, cp=2), GPT(SHAPE)
        context_parallel(model, mesh.cp)
        wrapped = Outer(model) if inside else model
        with pytest.raises(UsageError, match="shared each sample's tokens among ranks .*wrap it over mesh.dp_cp"):
            shard(wrapped, mesh.dp, stage)
        shard(wrapped, mesh.dp_cp, stage)

    run_local(4, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_partial_gradients_without_their_sum_are_refused(stage):
    """With sequence parallelism a rank's gradient of a norm covers its own tokens alone."""

    def rank(comm):
        mesh, model = DeviceMesh(comm, dp=2, tp=2), GPT(SHAPE)
        tensor = tensor_parallel(model, mesh.tp, sequence=True)
        with pytest.raises(UsageError, match="covers a part of the tokens, .*: write tensor = .*tensor.sum_partial"):
            shard(model, mesh.dp, stage)
        shard(model, mesh.dp, stage, before_reduce=tensor.sum_partial)

    run_local(4, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_without_the_sum_of_their_gradients_are_refused(stage):
    def rank(comm):
        mesh, model = DeviceMesh(comm, dp=2, tp=4), Llama(LlamaConfig(16, 16, 16, 1, 4, 2))
        tensor = tensor_parallel(model, mesh.tp)
        with pytest.raises(UsageError, match="k_proj.weight covers a part of .* heads on each .*: write tensor = "):
            shard(model, mesh.dp, stage)
        shard(model, mesh.dp, stage, before_reduce=tensor.sum_partial)

    run_local(8, rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_have_no_replicas_of_shards(stage):
    def rank(comm):
        mesh, model = DeviceMesh(comm, ep=2), Mixtral(EXPERTS)
        groups = expert_parallel(model, mesh.ep, mesh.edp).groups(mesh.dp_cp)
        with pytest.raises(UsageError, match="2 replicas of shards: those of experts have none"):
            shard(model, mesh.dp_cp, stage, groups=groups, replicas=2)

    run_local(4, rank)


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh: mp.DistributedDataParallel(GPT(SHAPE), mesh),
        *[lambda mesh, stage=stage: shard(GPT(SHAPE), mesh, stage) for stage in (0, 1, 2, 3)],
        lambda mesh: mp.fully_shard(GPT(SHAPE), mesh),
        lambda mesh: tensor_parallel(GPT(SHAPE), mesh),
        lambda mesh: context_parallel(GPT(SHAPE), mesh),
        lambda mesh: expert_parallel(Mixtral(EXPERTS), mesh, mesh.edp),
        lambda mesh: expert_parallel(Mixtral(EXPERTS), mesh.ep, mesh),
        lambda mesh: mp.ZeroOptimizer(GPT(SHAPE).parameters(), mp.AdamW, mesh),
    ],
)
def test_a_mesh_in_the_place_of_an_axis_is_refused(use):
    def rank(comm):
        with pytest.raises(UsageError, match="a DeviceMesh is no Communicator: give one of its axes, such as mesh.dp"):
            use(DeviceMesh(comm, dp=2))

    run_local(2, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cause", ["seed", "state"])
def test_ranks_of_tp_that_start_differently_are_refused(cause, size):
    def rank(comm):
        model = GPT(SHAPE, seed=comm.rank if cause == "seed" else 0)
        if cause == "state" and comm.rank == 1:
            model.ln_f.bias.data[-1] += 1e-9
        tensor_parallel(model, comm)

    name = {"seed": "wte.weight", "state": "ln_f.bias"}[cause]
    says = f"start from different values: {name} of rank 1 is not that of rank 0; give all ranks the same seed"
    with pytest.raises(UsageError, match=says):
        run_local(size, rank)


def test_the_comparison_of_tp_is_control_data_alone():
    def rank(comm):
        tensor_parallel(GPT(SHAPE), comm)
        return comm.traffic.bytes(), comm.traffic.bytes("control")

    for everything, control in run_local(2, rank):
        assert everything == control > 0


def test_a_pipeline_without_a_schedule_is_refused():
    def rank(comm):
        with pytest.raises(UsageError, match="pp = 2, but schedule is None"):
            parallelize(GPT(SHAPE), DeviceMesh(comm, pp=2))

    run_local(2, rank)
