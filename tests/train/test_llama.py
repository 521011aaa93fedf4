"""Claims about training a Llama: its flags, files and checkpoints, with a tied and an untied head, in any layout.

tests/train/test_combinations.py combines the untied one with everything else.
"""

import json

import numpy as np
import pytest
from combinations import TEXT, VOCAB
from launcher import run_mpi
from training import bits, config_for, on_each_rank, ranks_of, run_until, trainer_for, verdicts

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig
from minipar.nn.pretrained import load_config, load_pretrained, save_pretrained
from minipar.parallel.traffic import predicted_traffic
from minipar.train.config import parse, resolve, with_shape
from minipar.train.from_config import make_model, step_layout
from minipar.train.progress import describe, write_export

SHAPE = f"--model llama --layers 5 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq-len 8 --vocab-size {VOCAB}"
RUN = "--global-batch 4 --microbatches 2 --dtype float64 --steps 2 --eps 1e-5 --reduction ordered"
LAYOUTS = {
    "one rank": "",
    "dp, stage 3": "--dp 2 --zero-stage 3 --clip-grad 0.5",
    "dp, stage 3, recompute": "--dp 2 --zero-stage 3 --recompute full --sync-every-microbatch",
    "tp, sequence": "--tp 2 --sequence-parallel",
    "pp": "--pp 2",
    "pp, zero bubble, stage 2": "--dp 2 --pp 2 --schedule zb-h1 --zero-stage 2",
    "zbv, stage 3": "--dp 2 --pp 2 --schedule zbv --zero-stage 3 --clip-grad 0.5",
    "1f1b, stage 3, three axes": "--dp 2 --tp 2 --pp 2 --zero-stage 3 --sequence-parallel",
    "interleaved, stage 1": "--dp 2 --pp 2 --schedule interleaved-1f1b --zero-stage 1",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The directory of a model with a tied head, whose numbers the flags cannot say."""
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig(VOCAB, 24, 20, 5, 6, 2, 32, 1e-4, 500.0, tie_word_embeddings=True)
    save_pretrained(Llama(config, seed=3, dtype="float64"), folder)
    return folder


def from_directory(folder, flags):
    """As the program resolves --init-from."""
    config = with_shape(parse(f"--init-from {folder} --seq-len 8 {RUN} {flags}".split()), load_config(folder))
    return resolve(config, (config.mesh.dp or 1) * config.mesh.tp * config.mesh.pp)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_llama_trains_as_one_device_and_sends_as_said(layout, start):
    config = from_directory(start, LAYOUTS[layout])
    axes = ("dp", "cp", "tp", "pp")

    def inspect(comm):
        trainer = trainer_for(config, TEXT, comm)
        comm.traffic.reset()
        trainer.step(0)
        sent = {axis: comm.traffic.bytes(axis=axis) for axis in axes}
        return trainer.model.config, sent

    for rank, (shape, sent) in enumerate(run_local(ranks_of(config), inspect)):
        assert shape == load_config(start) and shape.tie_word_embeddings
        assert sent == predicted_traffic(step_layout(config, shape), rank)
    lines = {verdict.line for verdict in verdicts(config, TEXT) if verdict.passed}
    assert len(lines) == 1
    assert ("bit for bit" in lines.pop()) == (config.mesh.tp == 1)


def test_an_untied_head_saves_a_pipeline_the_exchange(start):
    """V h elements of float64 each step, on the first and on the last rank; and the head's own norm rows stay."""
    layouts = [step_layout(config_for(f"{SHAPE} {RUN} --pp 2"))]
    layouts.append(step_layout(from_directory(start, "--pp 2"), load_config(start)))
    for rank in range(2):
        untied, tied = (predicted_traffic(layout, rank)["pp"] for layout in layouts)
        assert tied - untied == VOCAB * 24 * 8


# ---- flags -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "--kv-heads 2": "--kv-heads 2 is for --model llama or mixtral: each head of GPT-2 has keys and values of its own",
    "--ffn 256": "--ffn 256 is for --model llama or mixtral",
    "--model llama --dropout 0.1": "--dropout 0.1 is for --model gpt2: Llama and Mixtral have no dropout",
    "--model llama --kv-heads 3": "heads 4 are not divisible by kv-heads 3",
    "--model llama --hidden 20": "hidden/heads = 20/4 is odd, but rotary positions rotate pairs",
    "--model llama --kv-heads 0": r"--kv-heads 0 is outside \[1, inf\)",
    "--model bert": "argument --model: invalid choice: 'bert'",
    "--model llama --heads 12 --hidden 48 --kv-heads 3 --tp 4": "tp/kv-heads = 4/3 is not a whole number",
    "--model llama --ffn 30 --tp 4": "ffn/tp = 30/4 is not a whole number",
    "--model llama --init-from DIR": "--model and --init-from both give the model's shape",
    "--kv-heads 2 --init-from DIR": "--kv-heads and --init-from both give the model's shape",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_fit_are_refused_by_name(flags):
    with pytest.raises(UsageError, match=REFUSED[flags]):
        config_for(flags, 4)


def test_dropout_of_a_loaded_llama_is_refused(start):
    with pytest.raises(UsageError, match="Llama and Mixtral have no dropout"):
        from_directory(start, "--dropout 0.1")


@pytest.mark.parametrize(("hidden", "ffn"), [(24, 64), (128, 384), (4096, 10944)])
def test_the_default_inner_size_is_eight_thirds_of_hidden(hidden, ffn):
    config = config_for(f"--model llama --hidden {hidden}", 1)
    assert (config.model.ffn, config.model.kv_heads) == (ffn, 4)
    assert ffn % 64 == 0 and 0 <= ffn - hidden * 8 / 3 < 64


def test_the_flags_make_the_model_and_rank_0_says_so():
    config = config_for(SHAPE, 1)
    model = make_model(config)
    assert model.config == LlamaConfig(VOCAB, 24, 20, 5, 6, 2, 8) and not model.config.tie_word_embeddings
    line = describe(config, 1, model.config.parameters, 500, "a text")
    assert "Llama with 15,672 parameters (5 layers, hidden 24, 6 heads on 2 of keys and values, float32)" in line


# ---- checkpoints and files -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [("--dp 2", "--dp 2 --zero-stage 3"), ("--pp 2", "--tp 2"), ("--tp 2", "")]
)
def test_a_resumed_llama_is_one_that_never_stopped(before, after, tied, start, tmp_path):
    def config(flags):
        return from_directory(start, flags) if tied else config_for(f"{SHAPE} {RUN} {flags}")

    state, results = run_until(TEXT, config(after))
    run_until(TEXT, config(before), tmp_path, 1)
    resumed = config_for(f"{SHAPE} {RUN} {after} --resume {tmp_path}")
    again, later = run_until(TEXT, resumed)
    assert list(again) == list(state) and ("lm_head.weight" in state) != tied
    if "--tp" in before + after:
        assert all(np.allclose(again[name], state[name], rtol=0, atol=1e-11) for name in state)
    else:
        assert bits(again) == bits(state) and later == results[1:]


def test_a_resumed_run_keeps_its_model(tmp_path):
    run_until(TEXT, config_for(f"{SHAPE} {RUN}"), tmp_path, 1)
    for flags, message in (
        (
            f"--model gpt2 --vocab-size {VOCAB}",
            "written with --model llama, --kv-heads 2, --ffn 20, but this run has --model gpt2",
        ),
        (SHAPE.replace("--kv-heads 2", "--kv-heads 3"), "written with --kv-heads 2, but this run has --kv-heads 3"),
    ):
        with pytest.raises(UsageError, match=message):
            trainer_for(
                config_for(f"--layers 5 --hidden 24 --heads 6 --seq-len 8 {RUN} {flags} --resume {tmp_path}"), TEXT
            )


@pytest.mark.parametrize("flags", ["", "--dp 2 --zero-stage 3", "--tp 2", "--pp 2"])
def test_an_exported_llama_is_the_trained_one(flags, tmp_path):
    config = config_for(f"{SHAPE} {RUN} {flags}")

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            write_export(trainer.model, str(tmp_path), state)
        return state

    state = on_each_rank(config, TEXT, export)[0]
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == LlamaConfig(VOCAB, 24, 20, 5, 6, 2, 8) and bits(loaded.state_dict()) == bits(state)


@pytest.mark.long
def test_a_llama_trains_resumes_and_exports_under_mpirun(tmp_path):
    flags = f"{SHAPE} --vocab-size 256 {RUN} --pp 2 --verify --save {tmp_path / 'c'} --record {tmp_path / 'r'}"
    first = run_mpi(4, ["-m", "minipar.train", *flags.split(), "--export", str(tmp_path / "e"), "--steps", "1"])
    assert first.returncode == 0 and "Llama with" in first.stdout and "bit for bit" in first.stdout, first.stderr
    rest = f"--resume {tmp_path / 'c'} --steps 2 --tp 2 --verify"
    second = run_mpi(2, ["-m", "minipar.train", *rest.split()])
    assert second.returncode == 0 and "within rounding" in second.stdout, second.stderr
    assert json.loads((tmp_path / "e" / "config.json").read_text())["model_type"] == "llama"
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert facts["shapes"]["lm_head.weight"] == [256, 24]
    third = run_mpi(2, ["-m", "minipar.train", "--init-from", str(tmp_path / "e"), "--steps", "1", "--seq-len", "8"])
    assert third.returncode == 0 and "6 heads on 2 of keys and values" in third.stdout, third.stderr


def test_a_gpt_directory_still_starts_a_gpt(tmp_path):
    save_pretrained(GPT(GPTConfig(VOCAB, 8, 24, 1, 2)), tmp_path)
    config = from_directory(tmp_path, "")
    assert (config.model.model, config.model.kv_heads, config.model.ffn) == ("gpt2", None, None)
