"""Claims about scripts that would train something else, with a wrapper and without: every rank raises an error."""

import numpy as np
import pytest
from refusals import refused_on_every_rank, run_script
from training import MLP

from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.parallel.wrap import shard

ALL, SHARDED = [0, 1, 2, 3], [1, 2, 3]
SERIAL = None  # in the place of a stage: no wrapper
EVERY = [SERIAL, *ALL]


class Mute(MLP):
    """A model without a loss."""

    loss_sum = Module.loss_sum


class SameNames(Module):
    """A model of two layers of one name."""

    def __init__(self):
        self.one, self.two = Linear(3, 3, name="fc"), Linear(3, 3, name="fc")


MODELS = {"SameNames": SameNames, "Mute": Mute, "MLP": MLP}
NAMES = MODELS | {"SGD": SGD, "AdamW": AdamW, "Linear": Linear, "shard": shard}

# Scripts in which `backward()` is that of the wrapper's loss, and `train(n)` makes n whole steps.
TWICE = "backward(); optimizer.step(); "
UNSYNCED = "with ddp.no_sync(): backward()\n"
FAILS = """
remove = model.parameters()[-1].register_post_accumulate_grad_hook(lambda leaf: 1 / 0)
try: backward()
except ZeroDivisionError: remove()
ddp.loss(x, y)
model.loss(x, y).backward()
"""
SCALED = "with ddp.scaled_backward(): model.loss_sum(x, y).backward()\n"
NEVER_SUMMED = f"{SCALED}try: optimizer.step()\nfinally: ddp.synchronize()"
CLIPS_ON_ONE_RANK = """
for step in range(8):
    backward()
    if step >= 3 and world.rank == 0: mp.clip_grad_norm(ddp.parameters(), 1e-3, world)
    optimizer.step(); optimizer.zero_grad()
"""
STEPS_ON_ONE_RANK = """
for step in range(2):
    backward()
    if world.rank == 0: optimizer.step()
    optimizer.zero_grad()
"""
PARTS = "train(1)\nif world.rank == 1: model.parameters()[-1].data[-1] += 1e-9\ntrain(3)"
STARTS_ELSEWHERE = """
model = MLP()
model.parameters()[-1].data[0] += 1e-9 * world.rank
shard(model, world, stage).loss(x, y)
"""
OLD_AND_NEW = """
model.parameters()[0].grad = np.ones((3, 5)); optimizer.step()
model.parameters()[1].grad = np.ones(5); optimizer.step()
"""
ZERO_GRAD, WRAPPER, RANKS = "zero_grad()", "AdamW(wrapper.parameters())", ("1", "0")
REFUSED = {  # the script, at these stages, the error, and what it shows
    "a forgotten zero_grad": (f"{TWICE} {TWICE}", EVERY, RuntimeError, ZERO_GRAD),
    "the same with microbatches": (f"{TWICE}\n{UNSYNCED}", ALL, RuntimeError, ZERO_GRAD),
    "an old gradient and a new one": (OLD_AND_NEW, [SERIAL], RuntimeError, ZERO_GRAD),
    "two steps of one backward": (f"{TWICE} optimizer.step()", EVERY, RuntimeError, "zero_grad()"),
    "zero_grad before step": (
        "backward(); optimizer.zero_grad(); optimizer.step()", EVERY, RuntimeError, "loss.backward()", "step()"),
    "a step before the sum": (f"{UNSYNCED}optimizer.step()", ALL, RuntimeError, "no_sync"),
    "a norm before the sum": (
        f"{UNSYNCED}mp.clip_grad_norm(ddp.parameters(), 1.0, world)", ALL, RuntimeError, "no_sync"),
    "a loss scaled, not summed": (NEVER_SUMMED, ALL, RuntimeError, "wrapper.synchronize()"),
    "an unscaled backward": (
        "model.loss(x, y).backward()", ALL, RuntimeError, "wrapper.loss(x, y)"),
    "the same after a failure": (FAILS, ALL, RuntimeError, "wrapper.loss(x, y)"),
    "a loss plus a term": (
        "(ddp.loss(x, y) + (model.first.bias**2.0).sum()).backward()", ALL, RuntimeError, "wrapper.scaled_backward()"),
    "two passes, one sum": (2 * SCALED, ALL, RuntimeError, "wrapper.no_sync()", "synchronize()"),
    "two passes, each summed": ("backward(); backward()", [0, 1], RuntimeError, "wrapper.no_sync()"),
    "two sums of one pass": ("backward(); ddp.synchronize()", [0, 1], RuntimeError, "synchronize()"),
    "backward twice": (
        "loss = ddp.loss(x, y); loss.backward(); loss.backward()", [SERIAL], ValueError, "backward()"),
    "backward under no_grad": (
        "with mp.no_grad(): loss = ddp.loss(x, y)\nloss.backward()", EVERY, ValueError, "backward()", "no_grad"),
    "an optimizer of the model": ("backward(); AdamW(model.parameters()).step()", SHARDED, ValueError, WRAPPER),
    "an optimizer made before": (
        "model = MLP(); optimizer = AdamW(model.parameters()); shard(model, world, stage).loss(x, y).backward(); "
        "optimizer.step()", SHARDED, ValueError, "first.weight", WRAPPER),
    "two optimizers": (
        "second = SGD(ddp.parameters()); backward(); optimizer.step(); second.step()", EVERY, RuntimeError),
    "the norm of shards": (
        "backward(); mp.clip_grad_norm(ddp.parameters(), 1.0)", SHARDED, UsageError, "clip_grad_norm"),
    "values replaced later": (
        "train(2); model.parameters()[-1].data = np.zeros(1); train(1)", [1, 2], UsageError, "second.bias.data"),
    "a shard's values replaced": (
        "p = ddp.parameters()[-1]; p.data = p.data.copy(); train(1)", SHARDED, UsageError, "p.data[...] = values"),
    "a model without a loss": ("shard(Mute(), world, stage).loss(x, y)", ALL, NotImplementedError, "loss_sum(x, y)"),
    "two layers of one name": ("shard(SameNames(), world, stage)", ALL, UsageError, "fc.weight"),
    "two wrappers of a model": ("shard(model, world, 3 - stage)", ALL, UsageError),
    "a frozen parameter": (
        "model = MLP(); model.parameters()[0].requires_grad = False; shard(model, world, stage)", ALL, UsageError,
        "first.weight"),
    "replicas that do not divide": ("shard(MLP(), mp.HybridComm(world, 3), stage)", SHARDED, UsageError, "2/3"),
    "other values at the start": (STARTS_ELSEWHERE, ALL, ValueError),
    "other rates": ("optimizer.lr = 0.1 / (1 + world.rank); train(2)", [0], ValueError, *RANKS),
    "other rates later": ("train(3); optimizer.lr = 0.1 / (1 + world.rank); train(5)", [0], ValueError, *RANKS),
    "parted parameters": (PARTS, [0], ValueError, "second.bias", *RANKS),
    "a norm clipped on one rank": (CLIPS_ON_ONE_RANK, [0], ValueError, "first.weight", *RANKS),
    "a step on one rank": (STEPS_ON_ONE_RANK, [0], ValueError, *RANKS),
}  # fmt: skip


def points(rank):
    """Two samples of this rank for an MLP."""
    draw = np.random.Generator(np.random.Philox(rank)).standard_normal
    return draw((2, 3)), draw((2, 1))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_trains_something_else_is_refused(name):
    script, stages, error, *values = REFUSED[name]

    def program(world, stage):
        model = MLP()
        ddp = model if stage is SERIAL else shard(model, world, stage)
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        x, y = points(world.rank)

        def backward():
            ddp.loss(x, y).backward()

        def train(steps):
            for _ in range(steps):
                backward()
                optimizer.step()
                optimizer.zero_grad()

        given = {"world": world, "stage": stage, "model": model, "ddp": ddp, "optimizer": optimizer, "x": x, "y": y}
        run_script(script, backward=backward, train=train, **given, **NAMES)

    for stage in stages:
        refused_on_every_rank(2, error, *values, by=lambda world, stage=stage: program(world, stage))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_rank_is_told_that_one_has_parted(wrong):
    def program(world):
        ddp = shard(MLP(), world, 0)
        for _ in range(2):
            ddp.loss(*points(world.rank)).backward()
            ddp.zero_grad()
            if world.rank == wrong:
                ddp.parameters()[-1].data += 1e-9

    other = max(wrong, 1)  # is named beside rank 0
    refused_on_every_rank(3, ValueError, "second.bias", str(other), "0", by=program)
