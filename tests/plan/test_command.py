"""The command line that trains a plan, word for word, for every flag and for none."""

from dataclasses import replace

import pytest
from planning import layout

from minipar.errors import UsageError
from minipar.plan.command import mesh_flags, model_flags, needs_directory, precision_flags, train_command
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import ModelShape, find_model

GPT2 = find_model("gpt2")
LLAMA = find_model("llama-3-8b")
MIXTRAL = find_model("mixtral-8x7b")
PLAIN = "--dp 1 --zero-stage 0 --global-batch 1 --microbatches 1"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, PLAIN),
        ({"cp": 2, "context_parallel": "ulysses", "cp_order": "contiguous"},
         "--dp 1 --cp 2 --context-parallel ulysses --cp-order contiguous --zero-stage 0 --global-batch 1 "
         "--microbatches 1"),
        ({"ep": 2}, PLAIN.replace("--dp 1", "--dp 1 --ep 2")),
        ({"tp": 2}, PLAIN.replace("--dp 1", "--dp 1 --tp 2")),
        ({"tp": 2, "etp": 2}, PLAIN.replace("--dp 1", "--dp 1 --tp 2")),
        ({"tp": 2, "etp": 1, "sequence_parallel": True},
         PLAIN.replace("--dp 1", "--dp 1 --tp 2 --etp 1 --sequence-parallel")),
        ({"pp": 2, "schedule": "gpipe"}, PLAIN.replace("--dp 1", "--dp 1 --pp 2 --schedule gpipe")),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b"},
         PLAIN.replace("--dp 1", "--dp 1 --pp 2 --schedule interleaved-1f1b --virtual-stages 2")),
        ({"dp": 4, "zero": 3, "zero_replicas": 2, "microbatch": 3, "microbatches": 5},
         "--dp 4 --zero-stage 3 --zero-replicas 2 --global-batch 60 --microbatches 5"),
    ],
)  # fmt: skip
def test_a_mesh_has_the_flags_of_what_it_uses(given, flags):
    assert mesh_flags(layout(**given)) == flags


def test_a_models_flags_are_those_of_its_kind():
    gpt = "--model gpt2 --layers 12 --hidden 768 --heads 12 --vocab-size 50257"
    assert model_flags(GPT2) == gpt
    sizes = "--layers 32 --hidden 4096 --heads 32"
    llama = "--kv-heads 8 --ffn 14336"
    assert model_flags(LLAMA) == f"--model llama {sizes} --vocab-size 128256 {llama}"
    assert model_flags(MIXTRAL) == f"--model mixtral {sizes} --vocab-size 32000 {llama} --experts 8 --top-k 2"


def test_a_tied_llama_and_a_gpt_of_another_mlp_need_a_directory():
    gpts = [ModelShape(1, 8, 2, 9, ffn=ffn) for ffn in (None, 32, 31, 40)]
    assert [needs_directory(model) for model in gpts] == [False, False, True, True]
    assert not needs_directory(replace(LLAMA, tied=False))
    assert needs_directory(replace(LLAMA, tied=True))


def test_a_model_that_needs_a_directory_is_trained_from_it():
    words = train_command("a dir", replace(LLAMA, tied=True), layout(), 64)
    assert words.startswith("mpirun -n 1 python -m minipar.train --init-from 'a dir' --seq-len 64 --dp 1 ")


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, "--dtype fp16 --gradients fp16 --reduce-dtype fp16 --attention full --recompute none"),
        ({"precision": PRECISIONS["bf16"]}, "--dtype bf16 --attention full --recompute none"),
        ({"precision": PRECISIONS["bf16"], "attention": "flash", "recompute": "full"},
         "--dtype bf16 --attention blockwise --recompute full"),
        ({"precision": PRECISIONS["bf16"], "recompute": "selective"},
         "--dtype bf16 --attention blockwise --recompute none"),
    ],
)  # fmt: skip
def test_dtypes_and_recomputation_have_their_flags(given, flags):
    assert precision_flags(layout(**given)) == flags


def test_cp_leaves_a_rank_fewer_tokens_to_divide():
    """Of 24 tokens each of two cp ranks has 12: four tp ranks divide them, and eight do not."""
    assert " --cp 2 " in train_command("m", LLAMA, layout(cp=2, tp=4, sequence_parallel=True), 24)
    with pytest.raises(UsageError, match="^tokens/tp = 12/8 is not a whole number: minipar.train has as many"):
        train_command("m", LLAMA, layout(cp=2, tp=8, sequence_parallel=True), 24)


def test_without_sequence_parallelism_tp_need_not_divide_tokens():
    assert train_command("m", LLAMA, layout(cp=2, tp=8), 24)
