"""Claims about a rank that holds no samples: it counts as zero in the loss and the gradient of all strategies."""

import numpy as np
import pytest
from training import backward, clip, gradient_of, gradient_on_one_device, joined, small_gpt, text, with_blocks

import minipar as mp
from minipar.comm import run_local
from minipar.nn.layers import DropoutKeys, dropping

LLAMA = mp.LlamaConfig(17, 16, 20, 2, 4, 2, 8)
MIXTRAL = mp.MixtralConfig(17, 16, 20, 2, 4, 2, 8, num_local_experts=4, num_experts_per_tok=2)


MODELS = {
    "GPT": lambda: small_gpt(layers=1),
    "GPT, attention in blocks": lambda: with_blocks(small_gpt(layers=1)),
    "GPT, recomputed": lambda: small_gpt(layers=2, recompute=True),
    "GPT of two heads": lambda: mp.GPT(mp.GPTConfig(17, 8, 12, 1, 2), dtype="float64"),
    "Llama": lambda: mp.Llama(LLAMA, dtype="float64"),
    "Llama, attention in blocks": lambda: with_blocks(mp.Llama(LLAMA, dtype="float64")),
    "Mixtral": lambda: mp.Mixtral(MIXTRAL, dtype="float64"),
}


def share(rank, ranks):
    """Ranks take turns at two samples: of three and more, the others have none."""
    x, y = text(range(2))
    return x[rank::ranks], y[rank::ranks]


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_without_samples_counts_as_zero(name):
    losses = []

    def serial(model):
        for r in range(2):  # sample by sample, as the ranks that have some
            losses.append(backward(model, *share(r, 2), scale=1 / 16))

    expected = gradient_on_one_device(MODELS[name](), [serial])

    def rank(world, stage):
        ddp = mp.shard(MODELS[name](), world, stage, "ordered")
        loss = ddp.loss(*share(world.rank, world.size))
        loss.backward()
        return loss.item(), gradient_of(ddp)

    for stage in range(4):
        for loss, gradient in run_local(3, rank, stage):
            assert loss == pytest.approx(sum(losses) / 16, rel=1e-13)
            for parameter, array in expected.items():
                np.testing.assert_allclose(gradient[parameter], array, rtol=1e-11, atol=1e-16, err_msg=parameter)


@pytest.mark.parametrize("name", ["GPT", "Mixtral"])
def test_a_step_with_no_samples_anywhere_changes_nothing(name):
    def rank(world, stage):
        ddp = mp.shard(MODELS[name](), world, stage)
        loss = ddp.loss(*(array[:0] for array in share(0, 1)))
        loss.backward()
        return loss.item(), clip(ddp, 1.0)

    for stage in (0, 3):
        assert run_local(2, rank, stage) == [(0.0, 0.0)] * 2


def test_dropout_draws_no_mask_for_no_samples():
    model = small_gpt(layers=1, dropout=0.5)
    with dropping(DropoutKeys(1, 2, [])):
        loss = model.loss(*share(2, 3))
        loss.backward()
    assert loss.item() == 0.0
    assert [p for p in model.parameters() if p.grad.any()] == []


AXES = [(name, axis) for name in ("GPT of two heads", "Llama", "Mixtral") for axis in ("tp", "cp")]


@pytest.mark.parametrize(("name", "axis"), [*AXES, ("Mixtral", "ep")])
def test_replicas_of_other_axes_may_be_without_samples(name, axis):
    def rank(world):
        mesh = mp.DeviceMesh(world, **{axis: 2})
        model = MODELS[name]()
        mine = text(range(1)) if mesh.dp.rank == 0 else share(2, 3)
        groups = before_reduce = None
        if axis == "ep":
            groups = mp.expert_parallel(model, mesh.ep, mesh.edp).groups(mesh.dp_cp)
        elif axis == "cp":
            context = mp.context_parallel(model, mesh.cp)
            mine = tuple(context.part(array) for array in mine)
        else:
            before_reduce = mp.tensor_parallel(model, mesh.tp).sum_partial
        ddp = mp.DistributedDataParallel(model, mesh.dp_cp, groups=groups, before_reduce=before_reduce)
        loss = ddp.loss(*mine)
        loss.backward()
        first = model.parameters()[0]
        return loss.item(), np.linalg.norm(joined(mesh.tp, first, first.grad))

    model = MODELS[name]()
    loss = model.loss(*text(range(1)))
    loss.backward()
    first = model.parameters()[0]
    first.fold_tied_gradients()
    for each in run_local(4, rank):
        np.testing.assert_allclose(each, (loss.item(), np.linalg.norm(first.grad)), rtol=1e-11)
