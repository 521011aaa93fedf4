"""Claims about scripts that would train something else, with a wrapper and without: every rank raises an error."""

import numpy as np
import pytest
from refusals import refused_on_every_rank, run_script
from training import MLP

import minipar as mp
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module, clip_grad_norm
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


class Foreign:
    """A model of another library: it has parameters and can be called, but is no mp.Module."""

    def parameters(self):
        return iter([np.zeros(3)])

    def __call__(self, x):
        return x


MODELS = {"SameNames": SameNames, "Mute": Mute, "Foreign": Foreign, "MLP": MLP}
NAMES = MODELS | {"SGD": SGD, "AdamW": AdamW, "Linear": Linear, "clip_grad_norm": clip_grad_norm, "shard": shard}

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
NEVER_SUMMED = """
with ddp.scaled_backward(): model.loss_sum(x, y).backward()
try: optimizer.step()
finally: ddp.synchronize()
"""
CLIPS = """
backward()
try: ddp.clip_grad_norm({})
finally: assert ddp.clip_grad_norm(None) > 0
"""
CLIPS_ON_ONE_RANK = """
for step in range(8):
    backward()
    if step >= 3 and world.rank == 0: ddp.clip_grad_norm(1e-3)
    optimizer.step(); optimizer.zero_grad()
"""
STEPS_ON_ONE_RANK = """
for step in range(2):
    backward()
    if world.rank == 0: optimizer.step()
    optimizer.zero_grad()
"""
PARTS = "train(1)\nif world.rank == 1: model.parameters()[-1].data[-1] += 1e-9\nddp.state_dict()"
HOLDS_THE_SAME = """
ddp = shard(MLP(), world, 3, replicas=2)
if world.rank == 1: ddp.parameters()[-1].data[-1] += 1e-9
ddp.state_dict()
"""
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
    "two steps of one backward": (f"{TWICE} optimizer.step()", EVERY, RuntimeError, "zero_grad()"),
    "an old gradient and a new one": (OLD_AND_NEW, [SERIAL], RuntimeError, ZERO_GRAD),
    "zero_grad before step": (
        "backward(); optimizer.zero_grad(); optimizer.step()", EVERY, RuntimeError, "loss.backward()", "step()"),
    "a step before the sum": (f"{UNSYNCED}optimizer.step()", ALL, RuntimeError, "no_sync"),
    "a norm before the sum": (f"{UNSYNCED}ddp.clip_grad_norm(1.0)", ALL, RuntimeError, "no_sync"),
    "a loss scaled, not summed": (NEVER_SUMMED, ALL, RuntimeError, "wrapper.synchronize()"),
    "an unscaled backward": (
        "model.loss(x, y).backward()", ALL, RuntimeError, "wrapper.loss(x, y)", "model.loss(x, y)"),
    "the same after a failure": (FAILS, ALL, RuntimeError, "wrapper.loss(x, y)"),
    "two passes, each summed": ("backward(); backward()", [0, 1], RuntimeError, "wrapper.no_sync()"),
    "backward after the step": (
        "old = ddp.loss(x, y); train(1); old.backward()", [SERIAL, 0], RuntimeError, "backward()"),
    "backward twice": (
        "loss = ddp.loss(x, y); loss.backward(); loss.backward()", [SERIAL], ValueError, "backward()"),
    "backward under no_grad": (
        "with mp.no_grad(): loss = ddp.loss(x, y)\nloss.backward()", EVERY, ValueError, "backward()", "no_grad"),
    "an optimizer of the model": ("AdamW(model.parameters())", SHARDED, ValueError, WRAPPER),
    "an optimizer made before": (
        "model = MLP(); optimizer = AdamW(model.parameters()); shard(model, world, stage).loss(x, y).backward(); "
        "optimizer.step()", SHARDED, ValueError, "first.weight", WRAPPER),
    "two optimizers": (
        "second = SGD(ddp.parameters()); backward(); optimizer.step(); second.step()", EVERY, RuntimeError),
    "a wrapper as parameters": ("AdamW(ddp)", ALL, UsageError, "wrapper.parameters()"),
    "the norm of shards": ("backward(); clip_grad_norm(ddp.parameters(), 1.0)", SHARDED, ValueError, "clip_grad_norm"),
    "a negative norm": (CLIPS.format(-1.0), ALL, UsageError, "max_norm", "-1.0"),
    "a norm that is nan": (CLIPS.format("float('nan')"), ALL, UsageError, "max_norm", "nan"),
    "a norm of text": (CLIPS.format("'1.0'"), ALL, UsageError, "max_norm", "1.0"),
    "a layer added later": (
        "train(2); model.third = Linear(3, 3, name='third', dtype='float64'); ddp.loss(x, y)", ALL, UsageError),
    "values replaced later": (
        "train(2); model.parameters()[-1].data = np.zeros(1); ddp.loss(x, y)", SHARDED, UsageError, "second.bias.data"),
    "a model without a loss": ("shard(Mute(), world, stage).loss(x, y)", ALL, TypeError, "Mute", "loss_sum(x, y)"),
    "another library's model": ("shard(Foreign(), world, stage)", ALL, UsageError, "Foreign", "mp.Module"),
    "two layers of one name": ("shard(SameNames(), world, stage)", ALL, UsageError, "fc.weight"),
    "a wrapper wrapped again": ("shard(ddp, world, stage)", ALL, UsageError),
    "two wrappers of a model": ("shard(model, world, 3 - stage)", ALL, UsageError),
    "a frozen parameter": (
        "model = MLP(); model.parameters()[0].requires_grad = False; shard(model, world, stage)", ALL, UsageError,
        "first.weight.requires_grad", "False"),
    "a state for a wrapper": ("ddp.load_state_dict({})", ALL, UsageError, "model.load_state_dict(state)"),
    "replicas that do not divide": ("shard(MLP(), world, stage, replicas=3)", SHARDED, UsageError, "replicas", "2/3"),
    "no replicas": ("shard(MLP(), world, stage, replicas=0)", SHARDED, UsageError, "replicas", "0"),
    "other values at the start": (STARTS_ELSEWHERE, ALL, ValueError),
    "other rates": ("optimizer.lr = 0.1 / (1 + world.rank); train(2)", ALL, ValueError, *RANKS),
    "other rates later": ("train(3); optimizer.lr = 0.1 / (1 + world.rank); train(5)", ALL, ValueError, *RANKS),
    "parted parameters": (PARTS, [0], ValueError, "second.bias", *RANKS),
    "parted replicas of shards": (HOLDS_THE_SAME, [3], ValueError, *RANKS),
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
        if world.rank == wrong:
            ddp.parameters()[-1].data += 1e-9
        ddp.state_dict()

    other = max(wrong, 1)  # is named beside rank 0
    refused_on_every_rank(3, ValueError, "second.bias", str(other), "0", by=program)


# ---- notes, which refuse nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ALL)
def test_one_batch_on_two_ranks_is_noted_once(stage, capfd):
    def rank(world, seeds):
        ddp = shard(MLP(), world, stage)
        with mp.no_grad():
            ddp.loss(*points(0))  # the same evaluation is no mistake
        for _ in range(2):
            ddp.loss(*points(seeds[world.rank])).backward()
            ddp.zero_grad()

    run_local(3, rank, [0, 1, 2])
    assert capfd.readouterr().err == ""
    run_local(3, rank, [4, 4, 4])
    line = capfd.readouterr().err
    assert line.startswith("minipar: note: ") and line.count("\n") == 1
