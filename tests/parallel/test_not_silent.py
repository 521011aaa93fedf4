"""Claims about mistakes that would train something else in silence: each is refused on every rank, or noted once.

docs/examples/README.md lists those that stay silent, and why.
"""

import re

import numpy as np
import pytest
from training import MLP, text

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear
from minipar.parallel.context import context_parallel
from minipar.parallel.expert import expert_parallel
from minipar.parallel.parallelize import shard
from minipar.parallel.pipeline.module import PipelineModule
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.zero_optimizer import ZeroOptimizer

STAGES = [0, 1, 2, 3]


def points(rank, step=0):
    """Two samples of this rank for an MLP."""
    draw = np.random.Generator(np.random.Philox(100 * step + rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


def train(ddp, optimizer, comm, steps, before_step=lambda step: None):
    """Train a wrapper on each rank's own points."""
    for step in range(steps):
        before_step(step)
        ddp.loss(*points(comm.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def refused(size, error, says, program):
    """Run a program whose error each rank must raise: a rank that does not is an error here."""

    def rank(comm):
        with pytest.raises(error, match=re.escape(says)):
            program(comm)

    run_local(size, rank)


# ---- a model that changes under a wrapper ----------------------------------------------------------------------------

LATER = [1, 2, 3, 6]  # steps before the mistake


@pytest.mark.parametrize("steps", LATER)
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_added_after_some_steps_is_refused(stage, steps):
    def program(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        train(ddp, optimizer, comm, steps)
        ddp.model.third = Linear(3, 3, name="third", dtype="float64")
        ddp.loss(*points(comm.rank))

    refused(2, UsageError, "the model has other parameters than when it was wrapped", program)


@pytest.mark.parametrize("steps", [0, *LATER])
@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_values_set_after_some_steps_are_refused(stage, which, steps):
    def program(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        train(ddp, optimizer, comm, steps)
        p = ddp.model.parameters()[which]
        p.data = np.zeros(p.shape)
        ddp.loss(*points(comm.rank))

    name = ["first.weight", "first.bias", "second.weight", "second.bias"][which]
    refused(2, UsageError, f"{name}.data was replaced after the model was wrapped", program)


def test_values_set_after_some_steps_are_trained_at_stage_0():
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.0)
        train(ddp, optimizer, comm, 2)
        p = ddp.model.parameters()[-1]
        p.data = np.full(p.shape, 7.0)
        train(ddp, optimizer, comm, 2)
        return ddp.state_dict()

    assert run_local(2, rank)[0]["second.bias"] == [7.0]


class MakesALayer(MLP):
    """A model whose forward makes a layer in each call."""

    def forward(self, x):
        return Linear(1, 1, name="fresh", dtype="float64")(super().forward(x))


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_forward_makes_is_refused(stage):
    def program(comm):
        shard(MakesALayer(), comm, stage).loss(*points(comm.rank))

    refused(2, UsageError, 'the layer of "fresh.weight" was made inside the loss of a wrapper', program)


def test_a_layer_may_be_made_between_losses_and_inside_no_grad():
    """As a model that judges another one's output, and is not trained."""

    class Judged(MLP):
        def loss_sum(self, x, y):
            with mp.no_grad():
                target = MLP()(x).data
            return ((self(x) - target) ** 2.0).sum()

    def rank(comm):
        ddp = shard(Judged(), comm, 0)
        optimizer = AdamW(ddp.parameters())
        for step in range(2):
            train(ddp, optimizer, comm, 1)
            Linear(1, 1, name=f"{step}")

    run_local(2, rank)


# ---- ranks that part later -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", LATER)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rate_that_differs_after_some_steps_is_refused(stage, steps):
    """Before twice as many steps have followed."""

    def program(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = SGD(ddp.parameters(), lr=0.1)

        def schedule(step):
            optimizer.lr = 0.1 if step < steps else 0.1 / (1 + comm.rank)

        train(ddp, optimizer, comm, 2 * steps + 2, schedule)

    refused(2, ValueError, "the ranks' optimizers have parted: the learning rate of rank 1", program)


@pytest.mark.parametrize("steps", LATER)
def test_a_zero_optimizers_rate_that_differs_later_is_refused(steps):
    def program(comm):
        mesh = DeviceMesh(comm)
        model = PipelineModule([MLP()], mesh, num_microbatches=1)
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        for step in range(2 * steps + 2):
            optimizer.lr = 0.1 if step < steps else 0.1 / (1 + comm.rank)
            model(*points(comm.rank, step))
            optimizer.step()
            optimizer.zero_grad()

    refused(2, ValueError, "the ranks' optimizers have parted: the learning rate of rank 1", program)


@pytest.mark.parametrize("steps", LATER)
def test_clipping_on_one_rank_that_begins_later_is_refused(steps):
    def program(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for step in range(2 * steps + 2):
            ddp.loss(*points(comm.rank, step)).backward()
            if step >= steps and comm.rank == 0:
                ddp.clip_grad_norm(1e-3)
            optimizer.step()
            optimizer.zero_grad()

    refused(2, ValueError, "the ranks' parameters have parted", program)


def test_ranks_are_compared_less_and_less_often():
    def rank(comm):
        ddp = shard(MLP(), comm, 0)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        compared = []
        for step in range(40):
            before = comm.traffic.bytes("control")
            train(ddp, optimizer, comm, 1)
            if comm.traffic.bytes("control") > before:
                compared.append(step + 1)
        return compared

    assert run_local(2, rank) == [[1, 2, 3, 5, 9, 17, 33]] * 2


# ---- batches ---------------------------------------------------------------------------------------------------------

SAME = "note: ranks 0 and 1 were given the same batch, which is then trained on twice; give each rank of"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_batch_on_two_ranks_is_noted_once(stage, steps, capfd):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        for step in range(steps):
            ddp.loss(*points(0, step)).backward()
            ddp.zero_grad()

    run_local(3, rank)
    assert capfd.readouterr().err.count(SAME) == 1


def test_one_batch_in_two_replicas_of_a_pipeline_is_noted_once(capfd):
    def rank(comm):
        stages = [lambda mesh: Linear(3, 3, name="zeroth", dtype="float64"), lambda mesh: MLP()]
        model = PipelineModule(stages, DeviceMesh(comm, dp=2, pp=2), num_microbatches=1)
        for step in range(2):
            model(*points(0, step))

    run_local(4, rank)
    error = capfd.readouterr().err
    assert error.startswith(f"minipar: {SAME}") and error.count("\n") == 1


def differs_in_targets(rank):
    return points(0)[0], points(rank)[1]


def differs_in_shape(rank):
    x, y = points(0)
    return x[: rank + 1], y[: rank + 1]


def has_no_samples(rank):
    return tuple(array[:0] for array in points(0))


def is_no_array(rank):
    class Pair(tuple):
        """An input of a user's own kind."""

    x, y = points(0)
    return Pair(x), y


@pytest.mark.parametrize("batch", [points, differs_in_targets, differs_in_shape, has_no_samples, is_no_array])
def test_other_batches_have_no_note(batch, capfd):
    class Sums(MLP):
        def loss_sum(self, x, y):
            return super().loss_sum(np.array(x).reshape(-1, 3), y)

    run_local(2, lambda comm: shard(Sums(), comm, 0).loss(*batch(comm.rank)).backward())
    assert capfd.readouterr().err == ""


def test_the_same_batch_may_be_evaluated_on_all_ranks(capfd):
    """A note follows if it is then trained on."""

    def rank(comm, batch):
        ddp = shard(MLP(), comm, 0)
        with mp.no_grad():
            ddp.loss(*points(0))
        ddp.loss(*points(batch * comm.rank)).backward()

    run_local(2, rank, 1)
    assert capfd.readouterr().err == ""
    run_local(2, rank, 0)
    assert capfd.readouterr().err.count(SAME) == 1


def gpt(**options):
    return mp.GPT(mp.GPTConfig(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2), dtype="float64", **options)


def split_gpt(comm):
    model = gpt()
    tensor_parallel(model, comm)
    return model


def model_of_ones_own(comm):
    return mp.VocabParallelEmbedding(17, 4, comm, name="embedding")


@pytest.mark.parametrize("make", [model_of_ones_own, split_gpt])
@pytest.mark.parametrize("cut", [lambda x, rank: x[rank : rank + 2], lambda x, rank: x[rank:]], ids=["other", "fewer"])
def test_other_tokens_on_the_ranks_of_tp_are_refused(make, cut):
    x = text(range(3))[0]
    says = "given different batches: x of rank 1 is not that of rank 0; give all of them the same one"
    refused(2, UsageError, says, lambda comm: make(comm)(cut(x, comm.rank)))


@pytest.mark.parametrize("make", [model_of_ones_own, split_gpt])
def test_tokens_are_compared_in_the_first_call_alone(make):
    """It costs a message, and a program that cuts the batch wrongly does so from the first call on."""

    def rank(comm):
        model = make(comm)
        x = text(range(3))[0]
        model(x)
        model(x[:2] if comm.rank == 0 else x[1:])

    run_local(2, rank)


def test_replicas_of_tp_have_batches_of_their_own():
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        model = split_gpt(mesh.tp)
        for step in range(2):
            model(text([mesh.dp.rank + step])[0])

    run_local(4, rank)


@pytest.mark.parametrize("deferred", [False, True])
def test_models_of_other_seeds_cannot_be_split(deferred):
    says = "tensor_parallel: the ranks' models start from different values: wte.weight of rank 1 is not that of rank 0"
    refused(2, UsageError, says, lambda comm: tensor_parallel(gpt(seed=comm.rank, deferred=deferred), comm))
    run_local(2, lambda comm: tensor_parallel(gpt(seed=3, deferred=deferred), comm))


# ---- a forgotten wrapper ---------------------------------------------------------------------------------------------


def train_tokens(model, optimizer, context, steps, sum_gradients=lambda: None):
    """Train on this rank's tokens, without a wrapper."""
    x, y = text(range(2))
    for _ in range(steps):
        loss = model.loss_sum(context.part(x), context.part(y)) * (1 / y.size)
        loss.backward()
        sum_gradients()
        optimizer.step()
        optimizer.zero_grad()


UNSUMMED = "each of a rank's own tokens, were not summed: "


@pytest.mark.parametrize(("method", "order"), [("ring", "zigzag"), ("ulysses", "contiguous")])
def test_gradients_of_a_ranks_tokens_alone_are_refused(method, order):
    """Without a wrapper; one over the axis of the samples alone is refused before (test_refusals.py)."""

    def program(comm):
        mesh = DeviceMesh(comm, cp=comm.size)
        model = gpt()
        context = context_parallel(model, mesh.cp, method, order)
        optimizer = AdamW(model.parameters())
        x, y = text(range(2))
        model.loss(context.part(x), context.part(y)).backward()
        optimizer.step()

    refused(2, UsageError, f"the gradients of cp, {UNSUMMED}wte.weight of rank 1", program)


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapper_over_all_tokens_trains_them(stage):
    def rank(comm):
        mesh = DeviceMesh(comm, dp=2, cp=2)
        model = gpt()
        context = context_parallel(model, mesh.cp)
        ddp = shard(model, mesh.dp_cp, stage)
        optimizer = AdamW(ddp.parameters())
        x, y = text(range(2 * mesh.dp.rank, 2 * mesh.dp.rank + 2))
        for _ in range(2):
            ddp.loss(context.part(x), context.part(y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_local(4, rank)


def test_gradients_that_a_script_sums_itself_are_fine():
    def rank(comm):
        model = gpt()
        context = context_parallel(model, comm)
        optimizer = AdamW(model.parameters())

        def sum_gradients():
            for p in model.parameters():
                p.fold_tied_gradients()
                comm.all_reduce(p.grad)

        train_tokens(model, optimizer, context, 2, sum_gradients)

    run_local(2, rank)


def test_zero_optimizer_over_all_tokens_sums_them():
    def rank(comm):
        model = gpt()
        context = context_parallel(model, comm)
        train_tokens(model, ZeroOptimizer(model.parameters(), AdamW, comm), context, 2)

    run_local(2, rank)


def test_ranks_of_cp_may_hold_other_experts():
    def rank(comm):
        mesh = DeviceMesh(comm, cp=2, ep=2)
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        model = mp.Mixtral(mp.MixtralConfig(vocab_size=17, hidden_size=8, intermediate_size=12, **sizes))
        context = context_parallel(model, mesh.cp)
        experts = expert_parallel(model, mesh.ep, mesh.edp)
        ddp = mp.DistributedDataParallel(model, mesh.dp_cp, groups=experts.groups(mesh.dp_cp))
        optimizer = AdamW(ddp.parameters())
        x, y = text(range(2))
        ddp.loss(context.part(x), context.part(y)).backward()
        optimizer.step()

    run_local(2, rank)


# ---- ZeroOptimizer over a serial model -------------------------------------------------------------------------------


def zero_step(comm, loss_of):
    """Take a step of ZeroOptimizer over an MLP; return the first weights."""
    model = MLP()
    optimizer = ZeroOptimizer(model.parameters(), SGD, comm, "ordered", lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    return model.first.weight.data.copy()


def test_the_gradients_of_ranks_means_are_not_added_up():
    def program(comm):
        zero_step(comm, lambda model: model.loss(*points(comm.rank)))

    refused(
        3, RuntimeError, "ZeroOptimizer would add up the gradients of 3 ranks' means: divide model.loss_sum", program
    )


@pytest.mark.parametrize("way", ["divided", "summed"])
def test_shares_of_the_global_mean_are_added_up(way):
    def loss_of(model, rank, size):
        if way == "divided":
            return model.loss(*points(rank)) / size
        return model.loss_sum(*points(rank)) / (2 * size)

    batch = tuple(np.concatenate(arrays) for arrays in zip(points(0), points(1), strict=True))
    (expected,) = run_local(1, lambda comm: zero_step(comm, lambda model: model.loss(*batch)))
    for weights in run_local(2, lambda comm: zero_step(comm, lambda model: loss_of(model, comm.rank, 2))):
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
