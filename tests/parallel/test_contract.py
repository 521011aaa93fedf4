"""Claims about every wrapper, ZeRO stage 0 (plain data parallelism) to 3: the obvious script trains one device's bits,
for a GPT and for a user's own module. (Wrong scripts are refused: tests/messages.)
"""

from contextlib import nullcontext

import numpy as np
import pytest
from training import MLP, bits, clip, gradient_of, gradient_on_one_device, small_gpt, text, whole_state

import minipar.nn as nn
from minipar.comm import run_local
from minipar.nn import SGD, AdamW, Parameter
from minipar.parallel.wrap import shard

STAGES = [0, 1, 2, 3]
STEPS = 3


class Three(nn.Module):
    """A model of three elements."""

    def __init__(self):
        self.weight = Parameter(np.array([0.5, -1.0, 2.0]))

    def forward(self, x):
        return x * self.weight

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2.0).sum()


def tokens_of(step, rank):
    """A batch of 1, 2, 3 ... samples on rank 0, 1, 2 ..., of which rank 1 ignores all targets and the others some."""
    x, y = text(100 * step + 10 * rank + sample for sample in range(rank + 1))
    y = y.copy()
    y[:, : 8 if rank == 1 else 3] = -100
    return x, y


def points_of(outputs):
    def batch(step, rank):
        random = np.random.Generator(np.random.Philox(100 * step + rank))
        return random.standard_normal((rank + 1, 3)), random.standard_normal((rank + 1, outputs))

    return batch


MODELS = {"GPT": (small_gpt, tokens_of), "MLP": (MLP, points_of(1)), "3 elements": (Three, points_of(3))}


def one_device(name, size):
    """Losses and final bits of one device that accumulates the ranks' batches in order."""
    make, batch = MODELS[name]
    model, losses = make(), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(size)]
        count = sum(model.target_count(y) for _, y in batches)
        sums = []

        def run(model, x, y, count=count, sums=sums):
            loss = model.loss_sum(x, y)
            sums.append(loss.item())
            loss.backward(np.full_like(loss.data, 1 / count))

        gradient = gradient_on_one_device(model, [lambda model, b=b, run=run: run(model, *b) for b in batches])
        for parameter_name, p in model.named_parameters():
            p.grad = gradient[parameter_name]
        optimizer.step()
        losses.append(np.cumsum(sums)[-1] / count)
    return losses, bits(model.state_dict())


def obvious_script(comm, name, stage, algorithm="ordered", zero_grad=lambda ddp, optimizer: optimizer.zero_grad()):
    """What a user writes; return the losses and, on rank 0, the final bits."""
    make, batch = MODELS[name]
    ddp = shard(make(), comm, stage, algorithm)
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = ddp.loss(*batch(step, comm.rank))
        loss.backward()
        optimizer.step()
        zero_grad(ddp, optimizer)
        losses.append(loss.item())
    return losses, bits(whole_state(ddp))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "size"), [("GPT", 1), ("GPT", 3), ("MLP", 2), ("3 elements", 5)])
def test_the_obvious_script_trains_one_devices_bits(name, size, stage):
    """The ranks hold unequal numbers of targets, one of them none; 5 ranks hold fewer elements than ranks."""
    losses, state = one_device(name, size)
    outcomes = run_local(size, obvious_script, name, stage)
    assert [outcome[0] for outcome in outcomes] == [losses] * size  # the same value on every rank
    assert [outcome[1] for outcome in outcomes] == [state] + [{}] * (size - 1)


@pytest.mark.parametrize(("name", "size"), [("GPT", 3), ("MLP", 2), ("3 elements", 5)])
def test_in_a_ring_all_stages_train_the_same_bits(name, size):
    runs = [run_local(size, obvious_script, name, stage, "ring")[0] for stage in STAGES]
    assert all(run == runs[0] for run in runs)
    losses, _ = one_device(name, size)
    np.testing.assert_allclose(runs[0][0], losses, rtol=1e-12)


ZERO_GRADS = {"model": lambda ddp, optimizer: ddp.model.zero_grad(), "wrapper": lambda ddp, optimizer: ddp.zero_grad()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("of", ZERO_GRADS)
def test_zero_grad_of_model_wrapper_and_optimizer_are_alike(of, stage):
    expected = run_local(2, obvious_script, "GPT", stage)
    assert run_local(2, obvious_script, "GPT", stage, "ordered", ZERO_GRADS[of]) == expected


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["GPT", "MLP"])
def test_microbatches_accumulate_under_no_sync(name, stage):
    make, batch = MODELS[name]

    def rank(comm):
        ddp = shard(make(), comm, stage)
        losses = []
        with ddp.no_sync():
            losses.append(ddp.loss(*batch(0, comm.rank)) / 2)
            losses[0].backward()
        losses.append(ddp.loss(*batch(1, comm.rank)) / 2)
        losses[1].backward()
        return sum(loss.item() for loss in losses), gradient_of(ddp)

    def whole(model):
        total = 0.0
        for step in (0, 1):
            batches = [batch(step, r) for r in range(3)]
            x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
            loss = model.loss(x, y) / 2
            loss.backward()
            total += loss.item()
        losses.append(total)

    losses = []
    expected = gradient_on_one_device(make(), [whole])
    for loss, gradient in run_local(3, rank):
        assert loss == pytest.approx(losses[0], rel=1e-12)
        for parameter_name, array in expected.items():
            np.testing.assert_allclose(gradient[parameter_name], array, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["GPT", "MLP"])
def test_two_losses_in_one_pass_are_summed_over_the_ranks_once(name, stage):
    make, batch = MODELS[name]

    def rank(comm, together):
        ddp = shard(make(), comm, stage, "ordered")
        batches = [batch(step, comm.rank) for step in (0, 1)]
        if together:
            (ddp.loss(*batches[0]) + ddp.loss(*batches[1])).backward()
        else:
            with ddp.no_sync():
                ddp.loss(*batches[0]).backward()
            ddp.loss(*batches[1]).backward()
        return gradient_of(ddp)

    one, two = (run_local(3, rank, together)[0] for together in (True, False))
    for parameter_name, array in two.items():
        np.testing.assert_allclose(one[parameter_name], array, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("stage", STAGES)
def test_a_term_is_added_to_the_loss_inside_scaled_backward(stage):
    def rank(comm):
        ddp = shard(MLP(), comm, stage, "ordered")
        loss = ddp.loss(*points_of(1)(0, comm.rank)) + (ddp(np.ones((1, 3))) ** 2.0).sum() / comm.size
        with ddp.scaled_backward():
            loss.backward()
        return gradient_of(ddp)

    def whole(model):
        x, y = (np.concatenate(arrays) for arrays in zip(*[points_of(1)(0, r) for r in range(3)], strict=True))
        (model.loss(x, y) + (model(np.ones((1, 3))) ** 2.0).sum()).backward()

    expected = gradient_on_one_device(MLP(), [whole])
    for gradient in run_local(3, rank):
        for name, array in expected.items():
            np.testing.assert_allclose(gradient[name], array, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("stage", [2, 3])
def test_synchronized_passes_add_up_where_gradients_are_sharded(stage):
    def rank(comm, passes):
        ddp = shard(MLP(), comm, stage, "ordered")
        for _ in range(passes):
            ddp.loss(*points_of(1)(0, comm.rank)).backward()
        return gradient_of(ddp)

    once, four_times = (run_local(2, rank, passes)[0] for passes in (1, 4))
    assert all(np.array_equal(four_times[name], 4 * once[name]) for name in once)


@pytest.mark.parametrize("stage", STAGES)
def test_any_optimizer_of_the_library_trains_the_same_bits(stage):
    def rank(comm, stage):
        ddp = shard(MLP(), comm, stage, "ordered")
        optimizer = SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            ddp.loss(*points_of(1)(step, comm.rank)).backward()
            clip(ddp, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return bits(whole_state(ddp))

    assert run_local(3, rank, stage) == run_local(3, rank, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_alone_gives_every_rank_the_models_output(stage):
    x = np.ones((2, 3))

    def rank(comm):
        return shard(MLP(), comm, stage)(x).data

    assert all(np.array_equal(y, MLP()(x).data) for y in run_local(2, rank))


# ---- where a script starts and ends ----------------------------------------------------------------------------------


def test_plain_data_parallelism_takes_the_models_parameters():
    def rank(comm, make_first):
        model = MLP()
        optimizer = AdamW(model.parameters()) if make_first else None
        ddp = shard(model, comm, 0)
        optimizer = optimizer or AdamW(ddp.parameters())
        ddp.loss(*points_of(1)(0, comm.rank)).backward()
        optimizer.step()
        return bits(whole_state(ddp))

    assert run_local(2, rank, True) == run_local(2, rank, False)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_zero_grad_is_refused_and_trains_nothing(stage, summed):
    def rank(comm):
        ddp = shard(MLP(), comm, stage)
        optimizer = AdamW(ddp.parameters())
        with nullcontext() if summed else ddp.no_sync():
            ddp.loss(*points_of(1)(0, comm.rank)).backward()
        (ddp if summed else optimizer).zero_grad()
        with pytest.raises(RuntimeError):
            optimizer.step()
        return bits(whole_state(ddp))

    assert run_local(2, rank)[0] == bits(MLP().state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_start_from_different_models_are_refused(stage):
    """PyTorch's DistributedDataParallel copies rank 0's parameters; here every rank draws them alike."""

    def rank(comm, spread):
        model = Three()
        model.weight.data[0] += spread * comm.rank
        ddp = shard(model, comm, stage)
        return ddp.loss(*points_of(3)(0, comm.rank)).item()

    assert len(set(run_local(3, rank, 0.0))) == 1
    with pytest.raises(ValueError):
        run_local(3, rank, 1e-9)
