"""Claims about what the planner prints: units that fit the model, numbers that fit the plans, and a line to copy."""

import json
import re
import shlex
from dataclasses import replace
from functools import cache

import pytest
from planning import tables

from minipar.errors import UsageError
from minipar.nn import GPT, GPTConfig
from minipar.nn.pretrained import save_pretrained
from minipar.plan.__main__ import main
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.command import train_command
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.model import MODELS, find_model
from minipar.plan.report import BYTE_UNITS, TIME_UNITS, unit_of
from minipar.plan.search import plan
from minipar.plan.space import SearchSpace
from minipar.train.config import parse, resolve, schedule_of

QUESTION = "--gpus 8 --gpu h100 --global-batch 32 --seq-len 64".split()


def printed(capsys, *argv):
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.fixture
def small(tmp_path, capsys):
    """The answer for a model of the size that README trains, from its directory."""
    save_pretrained(GPT(GPTConfig(256, 64, 128, 2, 4)), tmp_path)
    return printed(capsys, "--model", str(tmp_path), *QUESTION)


# ---- units and numbers -----------------------------------------------------------------------------------------------


def test_a_small_models_cells_are_not_all_zero(small):
    _, memory, seconds = tables(small)
    assert "fullest rank, MB:" in memory[0] and "Time of a step, us " in seconds[0] and "MB dp" in small
    for _, names, rows in (memory, seconds):
        columns = [names.index(name) + 1 for name in ("total", "activations", "compute", "update") if name in names]
        assert all(float(row[column]) > 0 for row in rows for column in columns)


def test_a_large_models_units_are_gigabytes_and_seconds(capsys):
    text = printed(capsys, *"--model gpt3-175b --gpus 1024 --gpu a100 --global-batch 1536 --seq-len 2048".split())
    _, memory, seconds = tables(text)
    assert "fullest rank, GB:" in memory[0] and "Time of a step, s " in seconds[0] and "GB dp" in text
    assert re.search(r"^2\. \d\.\d+ s slower", text, re.MULTILINE)


def test_the_units_are_those_of_the_json(tmp_path, capsys):
    save_pretrained(GPT(GPTConfig(256, 64, 128, 2, 4)), tmp_path)
    text = printed(capsys, "--model", str(tmp_path), *QUESTION)
    plans = json.loads(printed(capsys, "--model", str(tmp_path), *QUESTION, "--json", "-"))["plans"]
    _, memory, seconds = tables(text)
    for one, held, took in zip(plans, memory[2], seconds[2], strict=True):
        assert float(held[-1]) == pytest.approx(one["memory_bytes"]["total"] / 1e6, abs=0.05)
        assert float(took[seconds[1].index("total") + 1]) == pytest.approx(one["seconds"]["total"] * 1e6, rel=1e-3)
        assert float(took[-1]) == pytest.approx(one["communication_bytes"]["dp"] / 1e6, abs=0.05)


def test_a_unit_is_the_largest_that_fits_the_largest_value():
    assert [unit_of([0.0, value], BYTE_UNITS) for value in (1e9, 9.99e8, 1e6, 1e3, 999.0, 0.0)] == [
        "GB", "MB", "MB", "kB", "bytes", "bytes",
    ]  # fmt: skip
    assert [unit_of([value], TIME_UNITS) for value in (70.0, 1.0, 0.9, 1e-3, 1e-6, 1e-9)] == [
        "s", "s", "ms", "ms", "us", "us",
    ]  # fmt: skip


def test_plans_are_numbered_from_1_in_every_table(small, capsys):
    found = tables(small)
    assert len(found) == 3
    for _, _, rows in found:
        assert [row[0] for row in rows] == ["1.", "2.", "3.", "4.", "5."]
    reasons = re.findall(r"^(\d+)\. [\d.e-]+ us slower", small, re.MULTILINE)
    assert reasons == ["2", "3", "4", "5"]
    assert re.search(r"^(Tied.* first: 1\.|Only 1\.)", small, re.MULTILINE)


def test_a_reason_stands_at_its_plans_number(tmp_path, capsys):
    save_pretrained(GPT(GPTConfig(256, 64, 128, 2, 4)), tmp_path)
    text = printed(capsys, "--model", str(tmp_path), *QUESTION)
    plans = json.loads(printed(capsys, "--model", str(tmp_path), *QUESTION, "--json", "-"))["plans"]
    assert [one["rank"] for one in plans] == [1, 2, 3, 4, 5]
    for one in plans[1:]:
        assert f"\n{one['rank']}. {one['why']}\n" in text


def test_the_table_says_what_a_microbatch_is(small):
    assert "(microbatch: the samples in one x how many each replica runs):" in small


# ---- defaults --------------------------------------------------------------------------------------------------------

LINES = {
    ("a100", ()): "fp16: 2 + 2 + 12 bytes per parameter (weights, gradients, AdamW), 16-bit activations; attention",
    ("h100", ()): "bf16: 2 + 4 + 12 bytes per parameter (weights, gradients, AdamW), 16-bit activations; fl",
    ("h200", ()): "bf16: 2 + 4 + 12 bytes per parameter (weights, gradients, AdamW), 16-bit activations; flash",
    ("h100", ("--precision", "fp16", "--attention", "stored")): "fp16: 2 + 2 + 12 bytes per parameter (weights, gra",
    ("h100", ("--recompute", "selective")): "16-bit activations; attention's scores are stored",
    ("a100", ("--precision", "bf16", "--attention", "flash")): "bf16: 2 + 4 + 12 bytes per parameter (weights, grad",
}


@pytest.mark.parametrize(("gpu", "flags"), LINES)
def test_precision_and_attention_are_those_of_the_gpus_time(gpu, flags, capsys):
    question = f"--model gpt2 --gpus 8 --gpu {gpu} --global-batch 32 --seq-len 1024".split()
    text = printed(capsys, *question, *flags)
    assert LINES[gpu, flags] in text and "(--precision and --attention choose)" in text


# ---- a directory -----------------------------------------------------------------------------------------------------


def test_a_directory_without_a_config_is_one_line(tmp_path, capsys):
    assert main(["--model", str(tmp_path), *QUESTION]) == 2
    line = capsys.readouterr().err
    assert line.startswith("minipar: error: ") and line.count("\n") == 1
    assert "a directory without a config.json; `minipar train --export DIR` writes one" in line


def test_what_training_exports_is_planned(tmp_path):
    from combinations import TEXT, VOCAB
    from training import config_for, trainer_for

    shape = f"--layers 2 --hidden 12 --heads 2 --seq-len 8 --vocab-size {VOCAB} --global-batch 4 --steps 1"
    for kind, flags in {"gpt2": "", "llama": "--kv-heads 1", "mixtral": "--experts 4 --top-k 2"}.items():
        trainer = trainer_for(config_for(f"{shape} --model {kind} {flags}"), TEXT)
        save_pretrained(trainer.model, tmp_path / kind)
        found = find_model(str(tmp_path / kind))
        assert found.parameters == trainer.size and found.gated == (kind != "gpt2")


# ---- a command line to copy ------------------------------------------------------------------------------------------


def command_of(text):
    (line,) = re.findall(r"^  (mpirun -n .*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_the_last_line_trains_the_fastest_plan(small, tmp_path, capsys):
    assert small.splitlines()[-2].startswith("The flags of 1. for minipar.train, which runs it on so many ranks")
    words = command_of(small)
    assert words[:2] == ["mpirun", "-n"] and words[3:6] == ["python", "-m", "minipar.train"]
    config = resolve(parse(words[6:]), int(words[2]))
    best = json.loads(printed(capsys, "--model", str(tmp_path), *QUESTION, "--json", "-"))["plans"][0]
    assert [getattr(config.mesh, axis) for axis in ("dp", "tp", "pp")] == [best[axis] for axis in ("dp", "tp", "pp")]
    assert (config.data.global_batch, config.model.seq_len, config.model.hidden) == (32, 64, 128)


@cache
def plans_of(name, gpu, gpus, batch, length, attention, precision):
    cluster = Cluster(GPUS[gpu], gpus)
    space = SearchSpace(attention=attention, precision=PRECISIONS[precision])
    return plan(MODELS[name], cluster, batch, length, space, top=8).plans


QUESTIONS = [
    ("gpt2", "a100", 8, 64, 1024, "stored", "fp16"),
    ("gpt2-xl", "h100", 16, 96, 1024, "stored", "bf16"),
    ("megatron-18b", "a100", 64, 128, 2048, "stored", "fp16"),
    ("llama-3-8b", "h100", 64, 8, 131072, "flash", "bf16"),
    ("llama-3-70b", "h100", 512, 512, 4096, "flash", "bf16"),
    ("mixtral-8x7b", "h100", 64, 256, 4096, "flash", "bf16"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_a_plans_command_line_is_its_layout(question):
    name, _, gpus, batch, length, *_ = question
    for one in plans_of(*question):
        layout = one.layout
        words = shlex.split(train_command(name, MODELS[name], layout, length))
        config = resolve(parse(words[6:]), int(words[2]))
        mesh = config.mesh
        assert int(words[2]) == gpus == mesh.dp * mesh.cp * mesh.tp * mesh.pp
        assert (mesh.dp, mesh.cp, mesh.tp, mesh.pp, mesh.ep) == (*layout.mesh, layout.ep)
        assert (mesh.zero_stage, mesh.zero_replicas) == (layout.zero, layout.zero_replicas)
        assert mesh.sequence_parallel == layout.sequence_parallel
        assert layout.cp == 1 or (mesh.context_parallel, mesh.cp_order) == (layout.context_parallel, layout.cp_order)
        assert (config.data.global_batch, config.data.microbatches) == (batch, layout.microbatches)
        assert batch // (mesh.dp * config.data.microbatches) == layout.microbatch
        assert config.run.recompute == ("full" if layout.recompute == "full" else "none")
        assert config.run.gradients == ("float16" if layout.precision == PRECISIONS["fp16"] else "float32")
        if layout.pp > 1:
            schedule = schedule_of(config)
            assert len(schedule.home) == layout.pp * layout.stages_per_rank


def test_scores_that_are_computed_again_are_in_blocks():
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=1)
    for attention, recompute, flag in (
        ("stored", "none", "full"), ("stored", "full", "full"),
        ("stored", "selective", "blockwise"), ("flash", "none", "blockwise"),
    ):  # fmt: skip
        own = Layout(**vars(layout) | {"attention": attention, "recompute": recompute})
        assert f"--attention {flag} " in train_command("gpt2", MODELS["gpt2"], own, 64)


def test_a_layout_that_training_lacks_says_so(capsys, tmp_path):
    layout = Layout(dp=1, tp=16, pp=1, microbatch=1, microbatches=1)
    assert " --kv-heads 8 " in train_command("llama-3-8b", MODELS["llama-3-8b"], layout, 64)  # two ranks copy each
    odd = replace(MODELS["llama-7b"], ffn=11009)
    with pytest.raises(UsageError, match="ffn/tp = 11009/16 is not a whole number: minipar.train has whole columns"):
        train_command("llama-7b", odd, layout, 64)
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"n_inner": 9}))
    question = f"--model {tmp_path} --gpus 2 --gpu h100 --global-batch 2 --seq-len 16 --tp 2 --pp 1"
    assert printed(capsys, *question.split()).splitlines()[-1] == (
        "minipar.train cannot run 1.: ffn/tp = 9/2 is not a whole number: minipar.train has whole columns on each rank"
    )


def test_a_shape_that_no_flags_say_is_read_from_its_directory(tmp_path):
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=1)
    for inner, directory in ((None, False), (32, False), (24, True)):
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"n_inner": inner}))
        words = train_command(str(tmp_path), find_model(str(tmp_path)), layout, 16).split()
        assert ("--init-from" in words) == directory == ("--hidden" not in words)
