"""Claims about the Trainer: it trains what a plain loop trains, with every flag that decides a step, in parallel too.

`--verify` cannot see a flag that the Trainer ignores, because the Trainer is on both of its sides.
"""

import dataclasses
import itertools
import json
import sys
from functools import cache

import numpy as np
import pytest
from plain_loop import Recipe, train
from training import bits, config_for, on_each_rank, reports, trainer_for

from minipar.comm import serial
from minipar.nn import GPT, GPTConfig
from minipar.train import __main__ as program
from minipar.train import checkpoint
from minipar.train.data import Tokens
from minipar.train.pretrained import load_pretrained, save_pretrained

STEPS = 5
BITS = "bit for bit"
SHAPE = "--layers 2 --hidden 12 --heads 3 --vocab-size 11"
START = GPTConfig(11, n_positions=16, n_embd=12, n_layer=2, n_head=3, layer_norm_epsilon=1e-2)  # of --init-from
# So short that sequential samples wrap round it.
TEXT = Tokens(np.random.Generator(np.random.Philox(5)).integers(0, 11, 157).astype(np.uint8), "random text")

AXES = {
    "lr": [1e-3, 0.02],
    "lr_schedule": ["constant", "cosine"],
    "warmup_steps": [0, 2],
    "betas": [(0.9, 0.999), (0.7, 0.95)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.01, 0.5],
    "dropout": [0.0, 0.2],
    "clip_grad": [0.0, 0.1],
    "order": ["random", "sequential"],
    "seed": [0, 2**63 + 7],
    "global_batch": [6, 12],
    "microbatches": [1, 2, 3],
    "dtype": ["float32", "float64"],
    "recompute": ["none", "full"],
    "init_from": [False, True],
}


def pairs(choice):
    return set(itertools.combinations([(axis, choice[axis]) for axis in AXES if axis in choice], 2))


@cache
def covering():
    """Choices of a value of each axis in which every pair of values of two axes occurs. Greedy and without chance."""
    items = [[(axis, value) for value in values] for axis, values in AXES.items()]
    missing = dict.fromkeys(pair for a, b in itertools.combinations(items, 2) for pair in itertools.product(a, b))
    choices = []
    while missing:
        choice = dict(next(iter(missing)))
        for axis in AXES:
            if axis not in choice:
                covered = [sum(pair in missing for pair in pairs({**choice, axis: value})) for value in AXES[axis]]
                choice[axis] = AXES[axis][int(np.argmax(covered))]
        for pair in pairs(choice):
            missing.pop(pair, None)
        choices.append(choice)
    return choices


PLAIN = {
    "lr": 0.02, "lr_schedule": "cosine", "warmup_steps": 2, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.5,
    "dropout": 0.2, "clip_grad": 0.1, "order": "random", "seed": 2**63 + 7, "global_batch": 12, "microbatches": 1,
    "dtype": "float64", "recompute": "none", "init_from": False,
}  # fmt: skip


def command_line(choice, directory) -> str:
    words = [f"--seq-len 8 --steps {STEPS}", f"--init-from {directory}" if choice["init_from"] else SHAPE]
    for name, value in choice.items():
        if name != "init_from":
            words.append(f"--{name.replace('_', '-')} {' '.join(map(str, np.atleast_1d(value)))}")
    return " ".join(words)


def plain_arrays(choice, text=TEXT.ids):
    """Return the plain loop's (parameters, losses and norms). With --init-from too its model is made, not loaded."""
    options = {"dtype": choice["dtype"], "dropout": choice["dropout"], "recompute": choice["recompute"] == "full"}
    if choice["init_from"]:
        model = GPT(START, **options)
        for name, values in start().items():
            dict(model.named_parameters())[name].data[...] = values
    else:
        model = GPT(GPTConfig(11, 8, 12, 2, choice.get("heads", 3)), seed=choice["seed"], **options)
    names = {field.name for field in dataclasses.fields(Recipe)} & set(choice)
    recipe = Recipe(steps=STEPS, seq_len=8, **{name: choice[name] for name in names})
    results = train(model, text, recipe)
    return model.state_dict(), results


def plain(choice, text=TEXT.ids):
    state, results = plain_arrays(choice, text)
    return bits(state), results


@cache
def start():
    """The values in the directory of --init-from: ten times the usual, so that LayerNorm's epsilon matters."""
    return {name: 10 * values for name, values in GPT(START, seed=3).state_dict().items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_pretrained(GPT(START), folder, start())
    return folder


def trained(args):
    """Return what the Trainer gives on one device: (parameters, losses and norms)."""
    trainer = trainer_for(args, TEXT)
    results = reports(trainer.train())
    return bits(trainer.state_dict()), results


@pytest.mark.parametrize("number", range(len(covering())))
def test_the_trainer_is_the_plain_loop_bit_for_bit(number, directory):
    assert trained(config_for(command_line(covering()[number], directory))) == plain(covering()[number])


# ---- the rate after a resume -----------------------------------------------------------------------------------------


def resumed(choice, directory, folder):
    """Return what a run gives that is saved after 3 steps and continued by another Trainer."""
    flags = command_line(choice, directory)
    first = trainer_for(config_for(flags), TEXT)
    results = [first.step(step) for step in range(3)]
    checkpoint.save(first, folder, 3)
    state, rest = trained(config_for(f"{flags} --resume {folder}"))
    return state, reports(results) + rest


RESUMED = [
    dict(covering()[0], init_from=False, lr_schedule=schedule, warmup_steps=warmup)
    for schedule, warmup in (("cosine", 0), ("constant", 4))
]


@pytest.mark.parametrize("choice", RESUMED, ids=["cosine", "warmup"])
def test_a_resumed_run_is_the_plain_loop_too(choice, directory, tmp_path):
    assert resumed(choice, directory, tmp_path) == plain(choice)


# ---- in parallel -----------------------------------------------------------------------------------------------------

PARALLEL = {
    "--dp 3 --zero-stage 2 --clip-grad 0": BITS,
    "--dp 2 --zero-stage 3 --microbatches 2 --recompute full --clip-grad 0": BITS,
    "--dp 2 --tp 2 --sequence-parallel --dropout 0": "",
    "--dp 2 --pp 2 --zero-stage 1 --microbatches 2": "",
    "--dp 2 --cp 2 --dropout 0 --context-parallel all-gather": "",
}


@pytest.mark.parametrize("flags", PARALLEL)
def test_a_parallel_run_is_the_plain_loop_too(flags):
    """Bit for bit where promised, else within 1e-12 of a parameter's largest value. A norm is added up by rank."""
    args = config_for(f"{command_line(PLAIN, None)} --heads 2 --reduction ordered {flags}")
    chosen = {"heads": 2, "replicas": args.dp}
    for name in ("microbatches", "dropout", "clip_grad"):
        chosen[name] = getattr(args, name)
    state, results = on_each_rank(args, TEXT, lambda trainer, steps: (trainer.state_dict(), reports(steps)))[0]
    expected_state, expected_results = plain_arrays({**PLAIN, **chosen})
    np.testing.assert_allclose(results, expected_results, rtol=1e-12)
    if PARALLEL[flags] == BITS:
        assert bits(state) == bits(expected_state)
        assert [loss for loss, _ in results] == [loss for loss, _ in expected_results]
    for name, array in expected_state.items():
        np.testing.assert_allclose(state[name], array, rtol=0, atol=1e-12 * np.abs(array).max(), err_msg=name)


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, len(covering()) - 1])
def test_the_program_writes_what_the_plain_loop_gives(number, directory, tmp_path, monkeypatch):
    """Return what `--metrics` and `--export` write. `--eval-every` holds back the last tenth of the text."""
    choice = {name: value for name, value in covering()[number].items() if name != "eps"}  # it has no such flag
    (tmp_path / "text").write_bytes(TEXT.ids.tobytes())
    flags = f"--data {tmp_path}/text --metrics {tmp_path}/metrics --export {tmp_path}/model --eval-every 2"
    monkeypatch.setattr(sys, "argv", ["minipar.train", *command_line(choice, directory).split(), *flags.split()])
    with np.errstate():  # the program changes the process's settings
        assert program.run(serial()) == 0
    state, results = plain({**choice, "eps": 1e-8}, TEXT.ids[: -(len(TEXT.ids) // 10)])
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [(line["loss"], line["grad_norm"]) for line in lines] == results
    assert bits(load_pretrained(tmp_path / "model", dtype=choice["dtype"]).state_dict()) == state
