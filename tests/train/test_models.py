"""Claims about training a Llama or a Mixtral: their flags, files and checkpoints, and a head that is tied.

test_combinations.py has their layouts.
"""

import json

import numpy as np
import pytest
from combinations import TEXT, VOCAB, config_of
from training import bits, on_each_rank, ranks_of, run_until, trainer_for

from chapters.support.whole_runs import relative_difference
from minipar.comm import run_local
from minipar.nn import GPT, GPTConfig, Llama, LlamaConfig, MixtralConfig
from minipar.nn.pretrained import load_config, load_pretrained, save_pretrained
from minipar.parallel.traffic import predicted_traffic
from minipar.train.config import parse, resolve, with_shape
from minipar.train.from_config import make_model, step_layout
from minipar.train.progress import write_export
from minipar.train.verify import same_on_all_ranks

LLAMA = "--model llama --layers 4 --hidden 24 --heads 6 --kv-heads 2 --ffn 24 --seq-len 8"
MIXTRAL = LLAMA.replace("llama", "mixtral") + " --experts 4 --top-k 2"
SHAPES = {
    LLAMA: LlamaConfig(VOCAB, 24, 24, 4, 6, 2, 8),
    MIXTRAL: MixtralConfig(VOCAB, 24, 24, 4, 6, 2, 8, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("flags", SHAPES)
def test_the_flags_make_the_model(flags):
    assert make_model(config_of(flags)).config == SHAPES[flags]


@pytest.mark.parametrize(("hidden", "ffn"), [(24, 64), (128, 384), (4096, 10944)])
def test_the_default_inner_size_is_eight_thirds_of_hidden(hidden, ffn):
    model = resolve(parse(f"--model llama --hidden {hidden}".split()), 1).model
    assert (model.ffn, model.kv_heads) == (ffn, 4)


def test_without_flags_there_are_8_experts_and_2_per_token():
    model = resolve(parse(["--model", "mixtral"]), 1).model
    assert (model.experts, model.top_k, model.ffn) == (8, 2, 384)


# ---- a tied head -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The directory of a model with a tied head, whose numbers the flags cannot say."""
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig(VOCAB, 24, 24, 4, 6, 2, 32, 1e-4, 500.0, tie_word_embeddings=True)
    save_pretrained(Llama(config, seed=3, dtype="float64"), folder)
    return folder


def from_directory(folder, flags):
    """As the program resolves --init-from."""
    run = "--seq-len 8 --global-batch 4 --microbatches 2 --dtype float64 --steps 2 --eps 1e-4 --reduction ordered"
    config = with_shape(parse(f"--init-from {folder} {run} {flags}".split()), load_config(folder))
    return resolve(config, (config.mesh.dp or 1) * config.mesh.tp * config.mesh.pp)


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
    config = from_directory(tied, flags)

    def inspect(comm):
        trainer = trainer_for(config, TEXT, comm)
        comm.traffic.reset()
        trainer.step(0)
        return trainer.model.config, {axis: comm.traffic.bytes(axis=axis) for axis in trainer.mesh.AXES}

    for rank, (shape, sent) in enumerate(run_local(ranks_of(config), inspect)):
        assert shape == load_config(tied) and shape.tie_word_embeddings
        assert sent == predicted_traffic(step_layout(config, shape), rank)
    single, results = run_until(TEXT, from_directory(tied, "--dp 1"))
    state, reports = run_until(TEXT, config)
    assert np.allclose(reports, results, rtol=1e-12, atol=0)
    assert all(relative_difference(state[name], single[name]) <= 6e-12 for name in single)


def test_an_untied_head_saves_a_pipeline_the_exchange(tied):
    """V h elements of float64 in each step, on the first and on the last rank."""
    run = "--global-batch 4 --microbatches 2 --pp 2"
    layouts = [step_layout(config_of(f"{LLAMA} {run}")), step_layout(from_directory(tied, run), load_config(tied))]
    for rank in range(2):
        untied, with_head = (predicted_traffic(layout, rank)["pp"] for layout in layouts)
        assert with_head - untied == VOCAB * 24 * 8


def test_a_gpt_directory_starts_a_gpt(tmp_path):
    save_pretrained(GPT(GPTConfig(VOCAB, 8, 24, 1, 2)), tmp_path)
    config = from_directory(tmp_path, "")
    assert (config.model.model, config.model.kv_heads, config.model.ffn) == ("gpt2", None, None)


# ---- checkpoints and files -------------------------------------------------------------------------------------------

RESUMED = [
    (LLAMA, "--dp 2", "--dp 2 --zero-stage 3"),
    (LLAMA, "--pp 2", "--tp 2"),
    (MIXTRAL, "--dp 2", "--dp 2 --zero-stage 3"),
    (MIXTRAL, "--cp 2", "--dp 2 --zero-stage 1"),
    (f"{LLAMA} --hidden 32 --heads 8", "--tp 8", "--tp 2 --dp 2 --zero-stage 1"),  # each head of keys on four ranks
    (f"{LLAMA} --hidden 32 --heads 8 --kv-heads 1", "--tp 4 --dp 2 --zero-stage 3", ""),
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
    [
        (LLAMA, "--dp 2 --zero-stage 3"),
        (LLAMA, "--pp 2"),
        (MIXTRAL, "--tp 2"),
        (MIXTRAL, "--dp 2 --ep 2"),
        (f"{LLAMA} --hidden 32 --heads 8", "--tp 8"),
    ],
)
def test_an_exported_model_is_the_trained_one(model, layout, tmp_path):
    config = config_of(f"{model} {layout}")

    def export(trainer, results):
        state = trainer.state_dict()
        if state:
            write_export(trainer.model, str(tmp_path), state)
        return state

    state = on_each_rank(config, TEXT, export)[0]
    loaded = load_pretrained(tmp_path, dtype="float64")
    assert loaded.config == make_model(config).config and bits(loaded.state_dict()) == bits(state)
    started = with_shape(parse(f"--init-from {tmp_path} --seq-len 8".split()), load_config(tmp_path)).model
    assert (started.model, started.experts, started.ffn) == (config.model.model, config.model.experts, 24)


# ---- more tensor-parallel ranks than heads of keys and values --------------------------------------------------------

COPIED = f"{LLAMA} --hidden 32 --heads 8 --tp 4"


def test_a_checkpoint_has_each_copied_head_once(tmp_path):
    """The first rank of those with a copy writes it, as one of as many parts as there are heads."""
    run_until(TEXT, config_of(f"{COPIED} --tp 8"), tmp_path, 1)
    pieces = {}
    for file in json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["files"]:
        for piece in file["pieces"]:
            part = piece["cut"]["rank"] if piece["cut"] else None
            pieces.setdefault(piece["name"], []).append((file["name"][9], part))
    for name in ("k_proj", "v_proj"):
        assert pieces[f"model.layers.3.self_attn.{name}.weight"] == [("0", 0), ("4", 1)]
    assert len(pieces["model.layers.3.self_attn.q_proj.weight"]) == 8


@pytest.mark.parametrize(("name", "same"), [("k_proj", False), ("v_proj", False), ("q_proj", True)])
def test_a_copy_that_differs_on_any_rank_is_seen(name, same):
    """Ranks 0 and 1 have the one head, 2 and 3 the other; a head that nobody copies may differ."""

    def changed(comm, rank):
        trainer = trainer_for(config_of(COPIED), TEXT, comm)
        if comm.rank == rank:
            dict(trainer.model.named_parameters())[f"model.layers.1.self_attn.{name}.weight"].data[0, 0] += 1e-9
        return same_on_all_ranks(trainer)

    for rank in range(4):
        assert run_local(4, changed, rank) == [same] * 4
