"""Claims about training a Mixtral: its flags, files and checkpoints, and experts that have no tokens on some ranks.

tests/train/test_combinations.py combines it with everything else.
"""

import json

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from launcher import run_mpi
from training import bits, config_for, on_each_rank, run_until, trainer_for, verdicts

from minipar.errors import UsageError
from minipar.nn import MixtralConfig
from minipar.nn.pretrained import load_config, load_pretrained
from minipar.train.config import parse, with_shape
from minipar.train.from_config import make_model
from minipar.train.progress import describe, write_export

pytestmark = pytest.mark.sampled(3)

SHAPE = "--model mixtral --layers 2 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --experts 4 --top-k 2 --seq-len 8"
SHAPE += f" --vocab-size {VOCAB}"
RUN = "--global-batch 4 --microbatches 2 --dtype float64 --steps 2 --eps 1e-5 --reduction ordered"
LAYOUTS = {
    "dp": "--dp 2",
    "dp, stage 3": "--dp 2 --zero-stage 3 --clip-grad 0.5",
    "tp, sequence": "--tp 2 --sequence-parallel",
    "cp": "--cp 2",
    "pp, zero bubble, stage 2": "--dp 2 --pp 2 --schedule zb-h1 --zero-stage 2",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixtral_trains_as_one_device(layout):
    config = config_for(f"{SHAPE} {RUN} {LAYOUTS[layout]}")
    lines = {verdict.line for verdict in verdicts(config, TEXT) if verdict.passed}
    assert len(lines) == 1
    assert ("bit for bit" in lines.pop()) == (config.mesh.tp == config.mesh.cp == 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_without_tokens_train_as_on_one_device(layout):
    """A rank has at most 16 tokens of one slot in a microbatch, so that most of 40 experts have none there."""
    config = config_for(f"{SHAPE} {RUN} {LAYOUTS[layout]} --experts 40 --top-k 1 --weight-decay 0.5")
    assert {verdict.passed for verdict in verdicts(config, TEXT)} == {True}


# ---- flags -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "--experts 4": "--experts 4 is for --model mixtral: a layer of other models has one MLP",
    "--model llama --top-k 1": "--top-k 1 is for --model mixtral",
    "--model mixtral --dropout 0.1": "--dropout 0.1 is for --model gpt2: Llama and Mixtral have no dropout",
    "--model mixtral --experts 2 --top-k 3": "top-k 3 is more than experts 2",
    "--model mixtral --experts 1": "top-k 2 is more than experts 1",
    "--model mixtral --experts 0": r"--experts 0 is outside \[1, inf\)",
    "--model mixtral --kv-heads 3": "heads 4 are not divisible by kv-heads 3",
    "--model mixtral --ffn 30 --tp 4": "ffn/tp = 30/4 is not a whole number",
    "--experts 4 --init-from DIR": "--experts and --init-from both give the model's shape",
    "--top-k 4 --init-from DIR": "--top-k and --init-from both give the model's shape",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_fit_are_refused_by_name(flags):
    with pytest.raises(UsageError, match=REFUSED[flags]):
        config_for(flags, 4)


def test_experts_beyond_any_memory_are_refused_before_they_exist():
    with pytest.raises(UsageError, match="parameters .* bytes"):
        make_model(config_for("--model mixtral --experts 1000000000000", 1))


def test_without_flags_there_are_8_experts_and_2_per_token():
    config = config_for("--model mixtral", 1)
    assert (config.model.experts, config.model.top_k, config.model.ffn) == (8, 2, 384)


def test_the_flags_make_the_model_and_rank_0_says_so():
    config = config_for(SHAPE, 1)
    shape = make_model(config).config
    assert shape == MixtralConfig(VOCAB, 24, 20, 2, 6, 2, 8, num_local_experts=4, num_experts_per_tok=2)
    line = describe(config, 1, shape.parameters, 500, "a text")
    assert f"Mixtral with {shape.parameters:,} parameters (2 layers, hidden 24, 6 heads on 2 of keys and val" in line
    assert "4 experts of which a token goes through 2" in line


# ---- checkpoints and files -------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("--dp 2", "--dp 2 --zero-stage 3"), ("--pp 2", "--tp 2"), ("--tp 2", ""), ("--cp 2", "--dp 2 --zero-stage 1")],
)
def test_a_resumed_mixtral_is_one_that_never_stopped(before, after, tmp_path):
    state, results = run_until(TEXT, config_for(f"{SHAPE} {RUN} {after}"))
    run_until(TEXT, config_for(f"{SHAPE} {RUN} {before}"), tmp_path, 1)
    again, later = run_until(TEXT, config_for(f"{RUN} {after} --resume {tmp_path} {SHAPE}"))
    assert list(again) == list(state)
    if {"--tp", "--cp"} & set(f"{before} {after}".split()):
        assert all(np.allclose(again[name], state[name], rtol=0, atol=1e-11) for name in state)
    else:
        assert bits(again) == bits(state) and later == results[1:]


def test_a_resumed_run_keeps_its_experts(tmp_path):
    run_until(TEXT, config_for(f"{SHAPE} {RUN}"), tmp_path, 1)
    message = "written with --experts 4, --top-k 2, but this run has --experts 5, --top-k 1"
    with pytest.raises(UsageError, match=message):
        trainer_for(config_for(f"{SHAPE} {RUN} --experts 5 --top-k 1 --resume {tmp_path}"), TEXT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", ["", "--dp 2 --zero-stage 3", "--tp 2", "--pp 2"])
def test_an_exported_mixtral_is_the_trained_one(flags, tmp_path):
    config = config_for(f"{SHAPE} {RUN} {flags}")

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            write_export(trainer.model, str(tmp_path), state)
        return state

    state = on_each_rank(config, TEXT, export)[0]
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == make_model(config).config and bits(loaded.state_dict()) == bits(state)
    again = with_shape(parse(f"--init-from {tmp_path} --seq-len 8".split()), load_config(tmp_path)).model
    assert (again.model, again.experts, again.top_k, again.ffn) == ("mixtral", 4, 2, 20)


@pytest.mark.long
def test_a_mixtral_trains_resumes_and_exports_under_mpirun(tmp_path):
    flags = f"{SHAPE} --vocab-size 256 {RUN} --pp 2 --verify --save {tmp_path / 'c'} --record {tmp_path / 'r'}"
    first = run_mpi(4, ["-m", "minipar.train", *flags.split(), "--export", str(tmp_path / "e"), "--steps", "1"])
    assert first.returncode == 0 and "Mixtral with" in first.stdout and "bit for bit" in first.stdout, first.stderr
    rest = f"--resume {tmp_path / 'c'} --steps 2 --tp 2 --verify"
    second = run_mpi(2, ["-m", "minipar.train", *rest.split()])
    assert second.returncode == 0 and "within rounding" in second.stdout, second.stderr
    assert json.loads((tmp_path / "e" / "config.json").read_text())["model_type"] == "mixtral"
    third = run_mpi(2, ["-m", "minipar.train", "--init-from", str(tmp_path / "e"), "--steps", "1", "--seq-len", "8"])
    assert third.returncode == 0 and "4 experts of which a token goes through 2" in third.stdout, third.stderr
