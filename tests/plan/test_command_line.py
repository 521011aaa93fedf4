"""`python -m minipar.plan`: its table, its JSON, its picture, and bad input as one line and code 2."""

import contextlib
import io
import json
import os
import subprocess
import sys
from functools import cache, partial

import pytest

from minipar.plan import search
from minipar.plan.__main__ import main
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.model import find_model
from minipar.plan.pipeline_time import simulated_actions
from visualize.__main__ import main as visualize

GIVEN = "--model gpt3-175b --gpus 1024 --gpu a100 --gpus-per-node 8 --global-batch 1536 --seq-len 2048".split()
SMALL = {"model": "gpt2", "gpus": "16", "gpu": "h100", "global_batch": "64", "seq_len": "1024", "precision": "bf16"}


def changed(**given):
    argv = list(GIVEN)
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if flag in argv:
            argv[argv.index(flag) + 1] = value
        else:
            argv += [flag, value]
    return argv


@cache
def printed_by(*argv):
    """What a search prints. Those of 1024 GPUs take a second, so each is made once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(argv)) == 0
    return out.getvalue()


def found_plans(**given):
    return json.loads(printed_by(*changed(**given), "--json", "-"))["plans"]


def test_the_table_names_its_assumptions():
    printed = printed_by(*GIVEN)
    for words in ("174,615,846,912 parameters", "3,145,728 tokens per step", "Assumptions", "312 TFLOP/s"):
        assert words in printed
    for words in ("Memory of the fullest rank", "bubble", "MFU", "2. ", "s slower"):
        assert words in printed


def test_json_alone_on_standard_output():
    """A program of its own: no MPI, nothing else on standard output."""
    run = subprocess.run(
        [sys.executable, "-m", "minipar.plan", *GIVEN, "--json", "-", "--top", "3"], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stderr == ""
    found = json.loads(run.stdout)
    assert [one["rank"] for one in found["plans"]] == [1, 2, 3]
    for one in found["plans"]:
        assert one["dp"] * one["tp"] * one["pp"] == 1024 == found["gpus"]
        assert one["dp"] * one["microbatch"] * one["microbatches"] == 1536
        seconds, held = dict(one["seconds"]), dict(one["memory_bytes"])
        assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
        assert held.pop("total") == pytest.approx(sum(held.values()))
        assert one["mfu"] == pytest.approx(
            1536 * found["flops_per_sequence"]["model"] / one["seconds"]["total"] / 1024 / 312e12
        )
        assert one["tokens_per_second"] == pytest.approx(1536 * 2048 / one["seconds"]["total"])
        assert set(one["communication_bytes"]) == {"tp", "cp", "ep", "pp", "dp"} and one["why"] and one["simulated"]
        assert (one["cp"], one["context_parallel"], one["cp_order"]) == (1, None, None)
        assert one["seconds_from_to"] == pytest.approx([one["seconds"]["total"] * part for part in (0.85, 1.15)])
    fastest = found["plans"][0]["seconds"]["total"]
    near = {one["rank"] for one in found["plans"] if one["seconds"]["total"] <= 1.15 * fastest}
    assert set(found["tied"]) == near and found["spread"] == 0.15
    assert found["search"]["layouts"] >= found["search"]["fitting"] > 100
    assert found["assumptions"]["text"] and found["gpu"]["products"] == 0.75


def test_a_full_disk_is_one_line_and_code_2():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "minipar.plan", *changed(**SMALL), "--top", "1"]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr == "minipar: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["--top", "1"], ["--json", "-"], ["--json", "/dev/stdout"]])
def test_a_reader_that_has_gone_needs_no_message(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "minipar.plan", *changed(**SMALL), *arguments]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (2, "")


def test_a_full_disk_for_json_is_one_line(capsys):
    assert main([*changed(**SMALL), "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "minipar: error: --json /dev/full cannot be written: No space left on device\n"


def test_too_many_layouts_are_refused_at_once(capsys):
    """Nearly 40,000 of them would take a minute."""
    assert main(changed(gpus=str(1 << 20), gpus_per_node=str(1 << 20), global_batch=str(1 << 24), seq_len="64")) == 2
    assert "more than 25000 layouts: narrow the search, with --tp" in capsys.readouterr().err


def test_plans_beyond_the_most_actions_are_not_simulated(monkeypatch):
    """They keep the closed form's time, as a plan that is too long by itself does."""
    search_for = partial(search.plan, find_model("gpt2"), Cluster(GPUS["a100"], 8), 64, 1024, top=10)
    pipelines = [plan for plan in search_for().plans if plan.layout.pp > 1]
    assert len(pipelines) > 2 and all(plan.time.exact for plan in pipelines)
    monkeypatch.setattr(search, "MOST_SIMULATED", simulated_actions(pipelines[0].layout) - 1)
    assert 1 <= sum(plan.time.exact for plan in search_for().plans if plan.layout.pp > 1) < len(pipelines)


def test_a_name_cannot_change_what_the_terminal_shows(tmp_path, capsys):
    path = tmp_path / "a\n\x1b[31m\udcff.json"
    path.write_text('{"like": "a100"}')
    assert main(changed(**SMALL | {"gpu": str(path)})) == 0
    assert "a\\n\\x1b[31m\\udcff.json" in capsys.readouterr().out


def test_flags_narrow_the_search():
    narrow = "--tp 8 --pp 8 --zero-stage 1 --schedule 1f1b --recompute full --microbatch 2 --precision bf16".split()
    (one,) = json.loads(printed_by(*GIVEN, *narrow, "--json", "-"))["plans"]
    asked = [one[key] for key in ("tp", "pp", "zero_stage", "schedule", "recompute", "microbatch")]
    assert asked == [8, 8, 1, "1f1b", "full", 2]
    assert one["memory_bytes"]["gradients"] == 2 * one["memory_bytes"]["parameters"]


def test_replicas_and_several_zero_stages_narrow_the_search():
    plans = found_plans(dp="16", zero_stage="0,1,3", top="50")
    assert {one["dp"] for one in plans} == {16} and len(plans) > 2
    assert {one["zero_stage"] for one in plans} <= {0, 1, 3}
    assert {one["zero_stage"] for one in found_plans(dp="16", zero_stage="0", top="50")} == {0}


@pytest.mark.long
def test_replicas_of_shards_are_those_that_are_asked_for():
    assert {one["zero_replicas"] for one in found_plans(top="50")} == {1}
    plans = found_plans(zero_stage="3", zero_replicas="1,2,4", top="50")
    assert {one["zero_replicas"] for one in plans} == {1, 2, 4}
    assert all(one["dp"] % one["zero_replicas"] == 0 for one in plans)
    assert " 3 x2 " in printed_by(*changed(zero_stage="3", zero_replicas="2"))


LONG = {"model": "llama-3-8b", "gpus": "64", "gpu": "h100", "global_batch": "8", "seq_len": "1048576"}
LONG |= {"precision": "bf16", "attention": "flash"}


def test_a_long_sequence_is_cut_over_cp(tmp_path, capsys):
    plans = found_plans(**LONG)
    assert all(one["cp"] > 1 and one["dp"] * one["cp"] * one["tp"] * one["pp"] == 64 for one in plans)
    assert all(one["seconds"]["cp"] > 0 < one["communication_bytes"]["cp"] for one in plans)
    assert main([*changed(**LONG), "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "cp: the ring's messages hide behind" in printed and "GB cp" in printed
    assert visualize(["plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "plan.png")]) == 0


def test_cp_its_method_and_its_order_narrow_the_search():
    plans = found_plans(**LONG, cp="8,16", context_parallel="all-gather", cp_order="contiguous", top="50")
    assert {one["cp"] for one in plans} == {8, 16}
    assert {(one["context_parallel"], one["cp_order"]) for one in plans} == {("all-gather", "contiguous")}
    zigzag = found_plans(**LONG, cp="8", context_parallel="all-gather")[0]
    slow = next(one for one in plans if all(one[axis] == zigzag[axis] for axis in ("dp", "cp", "tp", "pp")))
    assert slow["seconds"]["compute"] > 1.5 * zigzag["seconds"]["compute"], "attention's efficiency is 8/15"


@pytest.mark.long
def test_short_sequences_are_cut_only_where_it_is_asked_for():
    assert "cp" not in printed_by(*GIVEN).split()
    assert {one["cp"] for one in found_plans(top="50")} == {1}
    assert {one["cp"] for one in found_plans(**SMALL, cp="2", context_parallel="ring")} == {2}


MIXTRAL = {"model": "mixtral-8x7b", "gpus": "64", "gpu": "h100", "global_batch": "256", "seq_len": "4096"}
MIXTRAL |= {"precision": "bf16", "attention": "flash"}


def test_experts_are_shared_over_ep(tmp_path, capsys):
    assert main([*changed(**MIXTRAL), "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "46,702,792,704 parameters, of which a token uses 12,879,925,248" in printed
    assert "2 of 8 experts" in printed and "ep: tokens are spread evenly over the experts" in printed
    assert "GB ep" in printed and "expert-parallel communication" in printed and "GB cp" not in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["model"]["active_parameters"], found["model"]["experts"]) == (12_879_925_248, 8)
    best = found["plans"][0]
    assert best["ep"] == 8 and best["seconds"]["ep"] > 0 < best["communication_bytes"]["ep"]
    axes = [tuple(mesh[axis] for axis in ("dp", "cp", "ep", "tp", "etp", "pp")) for mesh in found["meshes"]]
    assert len(set(axes)) == len(axes)
    assert visualize(["plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "plan.png")]) == 0


@pytest.mark.long
def test_ep_narrows_the_search_and_goes_over_hosts_if_asked():
    assert {one["ep"] for one in found_plans(**MIXTRAL, ep="1,4", top="50")} == {1, 4}
    narrow = {"tp": "4", "top": "50"}
    assert {(one["ep"], one["etp"]) for one in found_plans(**MIXTRAL, **narrow)} == {
        *((ep, None) for ep in (1, 2)),
        *((ep, 1) for ep in (1, 2, 4, 8)),
    }
    assert {one["etp"] for one in found_plans(**MIXTRAL, **narrow, etp="2,4")} == {2, None}
    assert {one["ep"] for one in found_plans(**MIXTRAL, **narrow, ep="8")} == {8}


def test_a_dense_models_table_has_no_experts():
    printed = printed_by(*changed(**SMALL, ep="1"))
    assert "ep" not in printed.split() and "experts" not in printed and "of which a token uses" not in printed


@pytest.mark.long
def test_tp_goes_over_hosts_only_where_it_is_asked_for():
    assert max(one["tp"] for one in found_plans(top="50")) == 8
    asked = found_plans(tp="16", top="50")
    assert {one["tp"] for one in asked} == {16}
    inside = found_plans(tp="8", pp=str(asked[0]["pp"]))
    assert asked[0]["seconds"]["tp"] > 2 * inside[0]["seconds"]["tp"]


def test_a_program_is_named_or_read_from_a_file(tmp_path):
    seconds = {}
    for text in ("{}", '{"like": "nanotron"}', '{"like": "nanotron", "host_layer": 1.0}'):
        path = tmp_path / f"{len(seconds)}.json"
        path.write_text(text)
        seconds[text] = found_plans(program=str(path), **SMALL)[0]["seconds"]["total"]
    own, nanotron, slow = seconds.values()
    assert own == found_plans(**SMALL)[0]["seconds"]["total"]
    assert nanotron == found_plans(program="nanotron", **SMALL)[0]["seconds"]["total"] > own
    assert slow > 12
    printed = printed_by(*changed(program="nanotron", **SMALL))
    assert "of these nanotron gets 53% in large products" in printed and "2 + 4 + 2 + 12 bytes" in printed
    assert "the host launches a layer's kernels, forward and backward, in 4.2 ms" in printed


def test_megatron_of_2021_hides_nothing():
    printed = printed_by(*changed(program="megatron-2021"))
    assert "2 + 2 + 4 + 12 bytes" in printed and "backward too" in printed and "+-" in printed
    assert "dp: gradients are reduced after backward" in printed and "behind the next forward" not in printed


def test_seconds_come_with_their_spread_and_ties_are_named():
    printed = printed_by(*GIVEN)
    assert "seconds are within 15 % of the printed ones in 17 of 20 runs" in printed
    assert "dp: gradients hide behind backward" in printed and "backward's hide behind weight gradients" in printed
    assert (
        " +-" in printed
        and "Tied, within 15% of the fastest, the simplest (no pipeline, fewer axes) first: " in printed
    )
    assert "Only 1. is within 15% of the fastest" in printed_by(*GIVEN, "--top", "1")


def test_the_picture_is_drawn_from_the_file(tmp_path, capsys):
    assert main([*changed(**SMALL), "--json", str(tmp_path / "plan.json")]) == 0
    assert visualize(["plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    for text in ("{}", '{"plans": [], "meshes": []}', '{"plans": [{}], "meshes": []}', "[1]"):
        (tmp_path / "other.json").write_text(text)
        assert visualize(["plan", str(tmp_path / "other.json"), "--out", str(tmp_path / "x.png")]) == 2
    assert "was not written by minipar.plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "gpt5"}, "--model gpt5"),
        ({"gpu": "b17"}, "--gpu b17"),
        ({"gpus": "12"}, "not a multiple of gpus-per-node 8"),
        ({"gpus": "0"}, "--gpus"),
        ({"gpus": "9999999"}, "--gpus 9999999"),
        ({"gpus": "eight"}, "--gpus"),
        ({"global_batch": "-1"}, "--global-batch"),
        ({"global_batch": "7", "tp": "1", "pp": "1"}, "no layout divides"),
        ({"gpus": "8"}, "nothing fits"),
        ({"tp": "12"}, "no layout divides with tp 12"),
        ({"tp": "64"}, "no layout divides with tp 64"),
        ({"dp": "5", "global_batch": "1000"}, "no layout divides with dp 5"),
        ({"dp": "5"}, "no layout divides with dp 5: global batch 1536"),
        ({"dp": "2", "tp": "8", "pp": "8"}, "no layout divides with dp 2, tp 8, pp 8: "),
        ({"dp": "9" * 4000}, "at most 1048576"),
        ({"dp": "2", "cp": "2", "tp": "8", "pp": "8"}, "no layout divides with dp 2, tp 8, pp 8, cp 2: "),
        ({"cp": "0"}, "argument --cp: invalid list of whole numbers from 1 up"),
        ({"cp": "2,"}, "argument --cp: invalid list of whole numbers from 1 up"),
        ({"cp": "2,2097152"}, "--cp 2097152: at most 1048576"),
        ({"cp": "2,3"}, "seq-len/(2*cp) = 2048/6 is not a whole number: zigzag has equal chunks"),
        ({"cp": "64", "tp": "8", "context_parallel": "ulysses"}, "ulysses' cp the heads of a tp rank"),
        ({"cp": "7", "seq_len": "2044", "cp_order": "contiguous"}, "no layout divides with cp 7"),
        ({"cp": "2", "context_parallel": "ring", "recompute": "selective"}, "ring and all-gather do not keep"),
        ({"cp": "1", "context_parallel": "ring"}, "about context parallelism; give --cp 2 or more"),
        ({"cp_order": "contiguous"}, "about context parallelism; give --cp 2 or more"),
        ({"ep": "2"}, "ep 2 divides the experts of a layer; each layer of this model has one MLP"),
        ({"ep": "0"}, "argument --ep: invalid list of whole numbers from 1 up"),
        ({"ep": "2097152"}, "--ep 2097152: at most 1048576"),
        (MIXTRAL | {"ep": "2,3"}, "experts/ep = 8/3 is not a whole number: each rank holds whole experts"),
        (MIXTRAL | {"ep": "3", "dp": "4", "cp": "1"}, "experts/ep = 8/3 is not a whole number"),
        (MIXTRAL | {"ep": "16"}, "experts/ep = 8/16 is not a whole number"),
        (MIXTRAL | {"ep": "8", "dp": "4", "cp": "1", "tp": "1"}, "no layout divides with dp 4, tp 1, cp 1, ep 8"),
        (MIXTRAL | {"ep": "8", "dp": "4", "etp": "3"}, "no layout divides with dp 4, ep 8, etp 3"),
        (MIXTRAL | {"tp": "4", "etp": "1", "sequence_parallel": "off"}, "parallelism, but --sequence-parallel is off"),
        (MIXTRAL | {"tp": "4", "etp": "1,8"}, "tp/etp = 4/8 is not a whole number: the ranks of etp are neighbours"),
        ({"etp": "1"}, "etp 1 divides the experts of a layer; each layer of this model has one MLP, no experts"),
        (MIXTRAL | {"ep": "2", "zero_replicas": "2"}, "no layout divides with replicas of shards 2, ep 2"),
        (MIXTRAL | {"ep": "1", "tp": "1", "pp": "1", "zero_stage": "1"}, "What would fit: --zero-stage "),
        ({"zero_stage": "0,4"}, "--zero-stage"),
        ({"zero_stage": "0,,1"}, "--zero-stage"),
        ({"zero_replicas": "0"}, "--zero-replicas"),
        ({"zero_replicas": "7", "zero_stage": "3"}, "no layout divides with replicas of shards 7"),
        ({"program": "nanotrom"}, "did you mean nanotron?"),
        ({"program": "x" * 5000}, "neither a JSON file nor one of megatron, megatron-2021, "),
        ({"pp": "1", "schedule": "1f1b"}, "--schedule 1f1b is a pipeline's, but --pp 1 is none"),
        ({"tp": "1", "sequence_parallel": "on"}, "--tp is 1"),
        ({"top": "51"}, "--top 51: at most 50"),
        ({"zero_stage": "4"}, "--zero-stage"),
        ({"schedule": "fast"}, "--schedule"),
        ({"schedule": "dualpipev"}, "invalid choice: 'dualpipev'"),
        ({"model": "x" * 5000}, "neither a directory nor one of"),
        ({"gpu": "x" * 5000}, "neither a JSON file nor one of"),
        ({"json": "/nowhere/plan.json"}, "--json /nowhere/plan.json cannot be written"),
        ({"seq_len": "99999999"}, "--seq-len 99999999: at most"),
    ],
)
def test_bad_input_is_one_line_and_code_2(given, words, capsys):
    assert main(changed(**given)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("minipar: error: ") and printed.err.count("\n") == 1
    assert words in printed.err


def test_only_a_named_models_positions_grow(tmp_path, capsys):
    assert main(changed(model="gpt2", seq_len="4096")) == 0
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert main(changed(model=str(tmp_path), seq_len="4096")) == 2
    assert "1024 learned positions" in capsys.readouterr().err
