"""Claims about the state that `--verify` compares: each part of it, on each rank, and in float32 besides 2 bytes."""

import numpy as np
import pytest
from training import config_for, ranks_of, trainer_for

from minipar.comm import run_local
from minipar.train.data import Tokens
from minipar.train.verify import Verifier, same_on_all_ranks, verify, whole_state

TEXT = Tokens(np.random.Generator(np.random.Philox(6)).integers(0, 16, 500).astype(np.uint8), "random text", 16)
SMALL = "--layers 2 --hidden 8 --heads 2 --seq-len 4 --vocab-size 16 --global-batch 4"


def on_ranks(flags, inspect):
    """What inspect(trainer) returns on each rank before the first step."""
    config = config_for(f"{SMALL} {flags}")
    return run_local(ranks_of(config), lambda comm: inspect(trainer_for(config, TEXT, comm)))


def nudged(array):
    """Change the last element by one unit in its last place."""
    flat = array.reshape(-1)
    flat[-1] = np.nextafter(flat[-1], flat.dtype.type(9))


def set_to(part, name, value):
    return lambda trainer: setattr(getattr(trainer, part), name, value)


WIDE = "--dp 2 --steps 1"
HALF = "--dp 2 --steps 1 --dtype fp16"
BIASED = "--dp 2 --steps 1 --model mixtral --experts 2 --ffn 8 --router-bias 0.1"
VALUES = ["optimizer steps", "good steps", "skipped steps", "loss scale"]


@pytest.mark.parametrize(
    ("flags", "kinds", "biases"), [(WIDE, "", 0), (HALF, "master", 0), (BIASED, "", 2), ("--tp 2 --pp 2", "", 0)]
)
def test_the_state_is_all_that_a_step_changes(flags, kinds, biases):
    """It has values and means of every parameter, and a master in 2 bytes, on rank 0 alone."""

    def inspect(trainer):
        trainer.scaler.good_steps, trainer.scaler.skipped, trainer.optimizer.steps = 3, 4, 5
        for moe in trainer.moes:
            moe.bias[:] = 0.25
        return whole_state(trainer), trainer.shapes, trainer.state_dict(), trainer.scaler.scale

    first, *others = on_ranks(flags, inspect)
    state, shapes, parameters, scale = first
    arrays = [f"{kind} of {name}" for kind in ("parameter", *kinds.split(), "exp_avg", "exp_avg_sq") for name in shapes]
    layers = [f"router bias of layer {number}" for number in range(biases)]
    assert sorted(state) == sorted([*arrays, *VALUES, *layers]) and [other[0] for other in others] == [{}] * len(others)
    assert [float(state[name]) for name in VALUES] == [5.0, 3.0, 4.0, scale]
    assert all((state[name] == 0.25).all() for name in layers)
    for name, values in parameters.items():
        kind = "master" if kinds else "parameter"
        assert np.array_equal(state[f"{kind} of {name}"], values) and not state[f"exp_avg of {name}"].any()


COPIES = [
    (WIDE, [1], lambda trainer: nudged(trainer.optimizer.parameters[-1].data)),
    (WIDE, [0], lambda trainer: nudged(trainer.optimizer.exp_avg[-1])),
    (WIDE, [1], lambda trainer: nudged(trainer.optimizer.exp_avg_sq[-1])),
    (HALF, [1], lambda trainer: nudged(trainer.optimizer.masters[-1])),
    (WIDE, [1], set_to("optimizer", "steps", 9)),
    (HALF, [1], set_to("scaler", "good_steps", 9)),
    (HALF, [0], set_to("scaler", "skipped", 9)),
    (HALF, [1], set_to("scaler", "scale", 9.0)),
    (BIASED, [1], lambda trainer: nudged(trainer.moes[1].bias)),
    ("--dp 2 --zero-stage 1", [1], lambda trainer: nudged(trainer.ddp.parameters()[0].data)),
    ("--tp 2", [1], lambda trainer: nudged(trainer.optimizer.parameters[-1].data)),  # a norm's, which is not cut
    ("--tp 2 --pp 2 --microbatches 2", [3], lambda trainer: nudged(trainer.optimizer.parameters[-1].data)),
    ("--dp 4 --zero-stage 2 --zero-replicas 2", [3], lambda trainer: nudged(trainer.optimizer.exp_avg[0])),
    ("--tp 2 --model llama --kv-heads 1", [1], lambda trainer: nudged(key(trainer).data)),
    ("--tp 2 --model llama --kv-heads 1", [1], lambda trainer: nudged(query(trainer).data)),
]


def key(trainer):
    """The weight of the only head of keys, of which each rank of tp has a copy."""
    return next(p for p in trainer.optimizer.parameters if "k_proj.weight" in p.placement.name)


def query(trainer):
    """The weight of a head of queries, of which each rank of tp has its own."""
    return next(p for p in trainer.optimizer.parameters if "q_proj.weight" in p.placement.name)


@pytest.mark.parametrize(("flags", "ranks", "change"), COPIES)
def test_what_several_ranks_hold_is_the_same_on_each(flags, ranks, change):
    def inspect(trainer):
        before = same_on_all_ranks(trainer)
        if trainer.mesh.world.rank in ranks:
            change(trainer)
        return before, same_on_all_ranks(trainer)

    own = change is COPIES[-1][-1]
    assert set(on_ranks(flags, inspect)) == {(True, own)}


FLOAT32 = [
    "--tp 2 --dp 2 --zero-stage 1",
    "--tp 2 --pp 2 --microbatches 2",
    "--dp 2 --ep 2 --model mixtral --experts 2 --top-k 1 --ffn 8 --router-bias 0.5",
]


@pytest.mark.parametrize("flags", FLOAT32)
def test_float32_starts_each_step_from_the_parameters_in_2_bytes(flags):
    """Large steps, so that the parameters of an earlier one would show; also a tied embedding and routers' biases."""
    config = config_for(f"{SMALL} {flags} --dtype bf16 --steps 2 --lr 0.05")
    verdict = run_local(ranks_of(config), lambda comm: verify(trainer_for(config, TEXT, comm)))[0]
    found = verdict.line.partition("computed in float32, by at most ")[2].split()
    assert verdict.passed and float(found[0]) < 1e-5, verdict.line


def test_float32_sends_tokens_to_the_experts_of_the_run():
    """The ranks' copy and one device's have the biases that the run's routers have after each step."""
    config = config_for(f"{SMALL} {FLOAT32[-1]} --dtype bf16 --steps 1")

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        verifier = Verifier(trainer)
        verifier.check_step(trainer.step(0))
        copies = [verifier.twin.ranks]
        if comm.rank == 0:
            copies.append(verifier.twin.gradients.device)
        biases = [[moe.bias.tolist() for moe in each.moes] for each in (trainer, *copies)]
        return all(each == biases[0] for each in biases), np.abs(biases[0]).max()

    assert run_local(2, rank) == [(True, 0.5)] * 2
