"""Claims about training a Llama or a Mixtral: their files and checkpoints, and a head that is tied.

test_combinations.py has their layouts.
"""

import numpy as np
import pytest
from combinations import TEXT, VOCAB, config_of
from training import bits, config_for, on_each_rank, ranks_of, run_until, trainer_for

from chapters.support.training import step_traffic
from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.more.llama import Llama, LlamaConfig
from minipar.train.flags import parse
from minipar.train.pretrained import load_config, load_pretrained, save_pretrained

LLAMA = "--model llama --layers 4 --hidden 24 --heads 6 --kv-heads 2 --ffn 24 --seq-len 8"
MIXTRAL = LLAMA.replace("llama", "mixtral") + " --experts 4 --top-k 2"


# ---- a tied head -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The directory of a model with a tied head, whose numbers the flags cannot say."""
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig(VOCAB, 24, 24, 4, 6, 2, 32, 1e-4, 500.0, tie_word_embeddings=True)
    save_pretrained(Llama(config, seed=3, dtype="float64"), folder)
    return folder


def from_directory(folder, flags):
    run = "--seq-len 8 --global-batch 4 --microbatches 2 --dtype float64 --steps 2 --eps 1e-4 --reduction ordered"
    return config_for(f"--init-from {folder} {run} {flags}")


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 2 --zero-stage 3 --recompute full --sync-every-microbatch",
        "--dp 2 --pp 2 --schedule zb-h1 --zero-stage 2",
        "--pp 2 --schedule zbv",
        "--dp 2 --tp 2 --pp 2 --zero-stage 3 --sequence-parallel",
    ],
)
def test_a_tied_llama_trains_as_one_device_and_sends_as_said(flags, tied):
    args = from_directory(tied, flags)

    def inspect(comm):
        trainer = trainer_for(args, TEXT, comm)
        comm.traffic.reset()
        trainer.step(0)
        return trainer.model.config, {axis: comm.traffic.bytes(axis=axis) for axis in trainer.mesh.AXES}

    for rank, (shape, sent) in enumerate(run_local(ranks_of(args), inspect)):
        assert shape == load_config(tied) and shape.tie_word_embeddings
        assert sent == step_traffic(args, rank)
    single, results = run_until(TEXT, from_directory(tied, "--dp 1"))
    state, reports = run_until(TEXT, args)
    assert np.allclose(reports, results, rtol=1e-12, atol=0)
    assert all(relative_difference(state[name], single[name]) <= 6e-12 for name in single)


def test_an_untied_head_saves_a_pipeline_the_exchange(tied):
    """V h elements of float64 in each step, on the first and on the last rank."""
    run = "--global-batch 4 --microbatches 2 --pp 2"
    runs = [config_of(f"{LLAMA} {run}"), from_directory(tied, run)]
    for rank in range(2):
        untied, with_head = (step_traffic(args, rank)["pp"] for args in runs)
        assert with_head - untied == VOCAB * 24 * 8


# ---- checkpoints and files -------------------------------------------------------------------------------------------

RESUMED = [
    (LLAMA, "--dp 2", "--dp 2 --zero-stage 3"),
    (LLAMA, "--pp 2", "--tp 2"),
    (MIXTRAL, "--dp 2", "--dp 2 --zero-stage 3"),
    (MIXTRAL, "--cp 2", "--dp 2 --zero-stage 1"),
    (f"{LLAMA} --hidden 32 --heads 8", "--tp 2", "--dp 2 --zero-stage 1"),
    (f"{LLAMA} --hidden 32 --heads 8 --kv-heads 4", "--tp 4 --dp 2 --zero-stage 3", ""),
]


@pytest.mark.parametrize(("model", "before", "after"), RESUMED)
def test_a_resumed_run_is_one_that_never_stopped(model, before, after, tmp_path):
    run = f"{model} --global-batch 4 --microbatches 2"
    state, results = run_until(TEXT, config_of(f"{run} {after}"))
    run_until(TEXT, config_of(f"{run} {before}"), tmp_path, 1)
    again, later = run_until(TEXT, config_of(f"{run} {after} --resume {tmp_path}"))
    assert list(again) == list(state)
    if {"--tp", "--cp"} & set(f"{before} {after}".split()):
        assert all(relative_difference(again[name], state[name]) <= 1e-11 for name in state)
        assert np.allclose(later, results[1:], rtol=1e-12, atol=0)
    else:
        assert bits(again) == bits(state) and later == results[1:]


@pytest.mark.parametrize(
    ("model", "layout"),
    [(LLAMA, "--dp 2 --zero-stage 3"), (LLAMA, "--pp 2"), (MIXTRAL, "--tp 2"), (MIXTRAL, "--dp 2 --ep 2")],
)
def test_an_exported_model_is_the_trained_one(model, layout, tmp_path):
    args = config_of(f"{model} {layout}")

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            save_pretrained(trainer.model, tmp_path, state)
        return state

    state = on_each_rank(args, TEXT, export)[0]
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == args.shape and bits(loaded.state_dict()) == bits(state)
    assert parse(f"--init-from {tmp_path} --seq-len 8".split()).shape == args.shape
