"""`python -m minipar.plan`: its numbers add up, its last line trains the fastest plan, and bad input is one line."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from planning import layout, tables

from minipar.bench.layouts import shape_of, stages_of
from minipar.errors import UsageError
from minipar.plan.__main__ import main
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.command import train_command
from minipar.plan.layout import PRECISIONS
from minipar.plan.model import MODELS
from minipar.plan.programs import PROGRAMS, find_gpu, find_program
from minipar.plan.search import plan
from minipar.plan.space import SearchSpace
from minipar.train.flags import parse
from visualize.__main__ import main as visualize

SMALL = {"model": "gpt2", "gpus": "16", "gpu": "h100", "global_batch": "64", "seq_len": "1024", "precision": "bf16"}


def argv(**given):
    return [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value)]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """Return what is printed, and the JSON file, of a program of its own, which starts no MPI."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    command = [sys.executable, "-m", "minipar.plan", *argv(**SMALL)]
    text, values = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["--json", "-"]))
    assert (text.returncode, text.stderr, values.returncode, values.stderr) == (0, "", 0, "")
    path.write_text(values.stdout)
    return text.stdout, path


def test_the_numbers_of_a_plan_add_up(answer):
    found = json.loads(answer[1].read_text())
    assert [one["rank"] for one in found["plans"]] == [1, 2, 3, 4, 5]
    for one in found["plans"]:
        assert one["dp"] * one["tp"] * one["pp"] == 16 and one["dp"] * one["microbatch"] * one["microbatches"] == 64
        seconds, held = dict(one["seconds"]), dict(one["memory_bytes"])
        total = seconds.pop("total")
        assert total == pytest.approx(sum(seconds.values()))
        assert held.pop("total") == pytest.approx(sum(held.values()))
        assert one["mfu"] == pytest.approx(64 * found["flops_per_sequence"]["model"] / total / 16 / 989e12)
        assert one["tokens_per_second"] == pytest.approx(64 * 1024 / total)
        assert one["seconds_from_to"] == pytest.approx([0.85 * total, 1.15 * total]) and found["spread"] == 0.15
    fastest = found["plans"][0]["seconds"]["total"]
    near = {one["rank"] for one in found["plans"] if one["seconds"]["total"] <= 1.15 * fastest}
    assert set(found["tied"]) == near
    assert found["search"]["layouts"] >= found["search"]["fitting"] > 100


def test_the_tables_have_the_numbers_of_the_json(answer):
    """In milliseconds and gigabytes here; a reason stands at its plan's number."""
    text, path = answer
    plans = json.loads(path.read_text())["plans"]
    _, memory, seconds = tables(text)
    assert "GB:" in memory[0] and "ms " in seconds[0]
    for one, held, took in zip(plans, memory[2], seconds[2], strict=True):
        assert held[0] == took[0] == f"{one['rank']}."
        assert float(held[-1]) == pytest.approx(one["memory_bytes"]["total"] / 1e9, abs=0.05)
        assert float(took[seconds[1].index("total") + 1]) == pytest.approx(one["seconds"]["total"] * 1e3, rel=1e-2)
        assert one["rank"] == 1 or f"\n{one['rank']}. {one['why']}\n" in text


def test_the_last_line_trains_the_fastest_plan(answer):
    text, path = answer
    (line,) = re.findall(r"^  (mpirun -n .*)$", text, re.MULTILINE)
    words = shlex.split(line)
    args = parse(words[6:], int(words[2]))
    best = json.loads(path.read_text())["plans"][0]
    assert [getattr(args, axis) for axis in ("dp", "tp", "pp")] == [best[axis] for axis in ("dp", "tp", "pp")]
    assert (args.global_batch, args.seq_len, args.hidden) == (64, 1024, 768)


def test_the_picture_is_drawn_from_the_file(answer, tmp_path, capsys):
    assert visualize(["plan", str(answer[1]), "--out", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    (tmp_path / "other.json").write_text('{"plans": [], "meshes": []}')
    assert visualize(["plan", str(tmp_path / "other.json"), "--out", str(tmp_path / "x.png")]) == 2


QUESTIONS = [
    ("gpt2", 8, 16, 1024, "stored", "bf16", {}),
    ("llama-3-8b", 16, 2, 131072, "flash", "bf16", {"recompute": "full"}),
    ("mixtral-8x7b", 16, 16, 4096, "flash", "fp16", {"recompute": "none", "schedule": "interleaved-1f1b"}),
]


@pytest.mark.parametrize(("name", "gpus", "batch", "length", "attention", "precision", "fixed"), QUESTIONS)
def test_a_plans_command_line_is_its_layout(name, gpus, batch, length, attention, precision, fixed, tmp_path):
    space = SearchSpace(attention=attention, precision=PRECISIONS[precision], **fixed)
    model = MODELS[name]
    plans = plan(model, Cluster(GPUS["h200"], gpus), batch, length, space, top=8).plans
    runs = [found.layout for found in plans if found.layout.expert_tp == found.layout.tp]
    assert len(runs) > 3
    for one in runs:
        line, *described = train_command(name, model, one, length).split("\n")
        words = shlex.split(line)
        for text in described:
            file, content = text.split(": ", 1)
            assert file == "DIR/config.json"
            (tmp_path / "config.json").write_text(content)
            words[words.index("DIR")] = str(tmp_path)
        args = parse(words[6:], int(words[2]))
        assert shape_of(args) == replace(model, kv_heads=model.groups, ffn=model.inner)
        assert int(words[2]) == gpus == args.dp * args.cp * args.tp * args.pp
        assert (args.dp, args.cp, args.tp, args.pp, args.ep) == (*one.mesh, one.ep)
        assert (args.zero_stage, args.sequence_parallel) == (one.zero, one.sequence_parallel)
        assert one.cp == 1 or args.context_parallel == one.context_parallel
        assert (args.global_batch, args.microbatches) == (batch, one.microbatches)
        assert args.recompute == ("full" if one.recompute == "full" else "none")
        assert args.dtype == ("float16" if precision == "fp16" else "bfloat16")
        assert one.pp == 1 or stages_of(args) == one.pp * one.stages_per_rank


@pytest.mark.parametrize(
    ("name", "change", "one", "words"),
    [
        ("llama-7b", {"ffn": 11009}, {"tp": 16}, "11009/16"),
        ("llama-7b", {}, {"cp": 2, "cp_order": "contiguous"}, "contiguous"),
        ("mixtral-8x7b", {}, {"tp": 2, "etp": 1, "sequence_parallel": True}, "etp 1"),
    ],
)
def test_a_layout_that_training_lacks_says_so(name, change, one, words):
    with pytest.raises(UsageError, match=words):
        train_command(name, replace(MODELS[name], **change), layout(**one), 64)


def test_a_users_own_gpu_and_program(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"like": "a100", "memory": 40e9}')
    assert find_gpu(str(path)) == replace(GPUS["a100"], memory=40e9)
    path.write_text('{"like": "nanotron", "links": 0.5, "host_layer": 0}')
    mine, like = find_program(str(path)), PROGRAMS["nanotron"]
    assert mine.assumptions == replace(like.assumptions, links=0.5, host_layer=0)
    assert (mine.framework, mine.spread) == (like.framework, like.spread)


@pytest.mark.parametrize(
    ("find", "text", "words"),
    [
        (find_gpu, '{"like": "a100", "memory": 0}', "memory is 0"),
        (find_gpu, '{"like": "a100", "memory": NaN}', "memory is nan"),
        (find_gpu, '{"like": "h100", "attention": 2}', "attention is 2"),
        (find_gpu, '{"like": []}', "like"),
        (find_program, '{"like": "pytorch"}', "pytorch"),
        (find_program, '{"link": 1}', "link"),
        (find_program, '{"products": 1.5}', "products is 1.5"),
        (find_program, "[3]", "mine.json"),
    ],
)
def test_a_file_that_describes_no_gpu_or_program(find, text, words, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        find(str(path))


HUGE = {"model": "gpt3-175b", "gpus": "1048576", "gpus_per_node": "1048576", "global_batch": "16777216"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "gpt5"}, "gpt5"),
        ({"gpu": "b17"}, "b17"),
        ({"gpus": "12"}, "12"),
        ({"gpus": "eight"}, "eight"),
        ({"global_batch": "-1"}, "-1"),
        ({"dp": "9" * 4000}, "--dp"),
        ({"cp": "2,"}, "--cp"),
        ({"ep": "2"}, "ep 2"),
        ({"zero_stage": "0,4"}, "0,4"),
        ({"pp": "1", "schedule": "1f1b"}, "--schedule 1f1b"),
        ({"program": "nanotrom"}, "nanotron"),
        ({"seq_len": "99999999"}, "99999999"),
        ({"json": "/nowhere/plan.json"}, "/nowhere/plan.json"),
        ({"json": "/dev/full"}, "/dev/full"),
        (HUGE, "25000"),
    ],
)
def test_bad_input_is_one_line_and_code_2(given, words, capsys):
    assert main(argv(**SMALL | {"top": "1"} | given)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("minipar: error: ") and printed.err.count("\n") == 1
    assert words in printed.err
