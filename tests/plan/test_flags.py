"""Claims about the planner's flags: which it needs, which words refuse a value, and the largest sizes that it takes."""

import json

import pytest

from minipar.plan.__main__ import check_limits, main, parser, read_request
from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.programs import PROGRAMS

NEEDED = "--model gpt2 --gpus 8 --gpu a100 --global-batch 16 --seq-len 1024".split()


def refused(capsys, *words):
    """Return the line that refuses a command line."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.removeprefix("minipar: error: ").removesuffix("\n")


def space_of(*words):
    """Return what is searched with these flags besides those that are needed."""
    return read_request(parser().parse_args([*NEEDED, *words])).space


def test_five_flags_are_needed(capsys):
    needed = "the following arguments are required: --model, --gpus, --gpu, --global-batch, --seq-len"
    assert refused(capsys) == needed


@pytest.mark.parametrize("flag", NEEDED[::2])
def test_a_needed_flag_that_is_missing_is_named(flag, capsys):
    place = NEEDED.index(flag)
    rest = NEEDED[:place] + NEEDED[place + 2 :]
    assert refused(capsys, *rest) == f"the following arguments are required: {flag}"


WHOLE = "whole number from 1 up"
SIZES = "list of whole numbers from 1 up, such as 1,2,4"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--gpus", "0", WHOLE),
        ("--gpus-per-node", "x", WHOLE),
        ("--global-batch", "1.5", WHOLE),
        ("--seq-len", "-1", WHOLE),
        ("--dp", "0", WHOLE),
        ("--tp", "0", WHOLE),
        ("--pp", "0", WHOLE),
        ("--microbatch", "0", WHOLE),
        ("--top", "0", WHOLE),
        ("--cp", "1,x", SIZES),
        ("--ep", "0", SIZES),
        ("--etp", "1,0", SIZES),
        ("--zero-replicas", "2,,4", SIZES),
        ("--zero-stage", "0,4", "list of stages from 0 to 3, such as 0,1,3"),
    ],
)
def test_a_wrong_size_is_told_what_it_should_be(flag, value, expected, capsys):
    assert refused(capsys, *NEEDED, flag, value) == f"argument {flag}: invalid {expected} value: '{value}'"


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [
        ("--precision", "fp8", "fp16, bf16"),
        ("--attention", "lash", "stored, flash"),
        ("--context-parallel", "rings", "ring, all-gather, ulysses"),
        ("--cp-order", "striped", "zigzag, contiguous"),
        ("--recompute", "all", "none, selective, full"),
        ("--sequence-parallel", "yes", "on, off"),
        ("--schedule", "dualpipev", "naive, gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zbv"),
    ],
)
def test_a_wrong_choice_is_told_all_choices(flag, value, known, capsys):
    words = refused(capsys, *NEEDED, flag, value).replace("'", "").partition("; did you mean")[0]
    assert words == f"argument {flag}: invalid choice: {value} (choose from {known})"


def test_a_flag_is_not_shortened(capsys):
    assert refused(capsys, *NEEDED, "--micro", "1").startswith("unrecognized arguments: --micro 1")


def test_the_usage_names_the_program():
    assert parser().format_usage().startswith("usage: python -m minipar.plan [-h]")


@pytest.mark.parametrize(
    ("flag", "most"),
    [("--gpus", 1 << 20), ("--tp", 1 << 20), ("--global-batch", 1 << 24), ("--seq-len", 1 << 24), ("--top", 50)],
)
def test_a_size_is_refused_beyond_the_largest(flag, most, capsys):
    check_limits(parser().parse_args([*NEEDED, flag, str(most)]))
    assert refused(capsys, *NEEDED, flag, str(most + 1)) == f"{flag} {most + 1}: at most {most}"


def test_without_flags_all_is_searched():
    space = space_of()
    assert space.zero == (0, 1, 2, 3)
    assert space.zero_replicas == 1
    assert space.cp_order == "zigzag"
    assert space.sequence_parallel is None
    assert [space.dp, space.tp, space.pp, space.microbatch, space.recompute, space.schedule] == [None] * 6
    assert [space.cp, space.context_parallel, space.ep, space.etp] == [None] * 4


def test_a_host_has_eight_gpus_without_a_flag():
    assert parser().parse_args(NEEDED).gpus_per_node == 8


def test_all_zero_stages_can_be_given():
    assert space_of("--zero-stage", "0,1,2,3").zero == (0, 1, 2, 3)


def test_axes_of_one_rank_refuse_only_their_own_flags():
    """An order needs cp 2, a schedule pp 2, sequence parallelism tp 2. Without that, etp may be as large as tp."""
    assert space_of("--cp", "1,2", "--cp-order", "contiguous").cp_order == "contiguous"
    assert space_of("--pp", "2", "--schedule", "gpipe").schedule == "gpipe"
    assert space_of("--tp", "2", "--sequence-parallel", "on").sequence_parallel is True
    assert space_of("--tp", "1", "--sequence-parallel", "off").sequence_parallel is False
    whole = space_of("--tp", "4", "--etp", "4", "--sequence-parallel", "off")
    assert (whole.tp, whole.etp, whole.sequence_parallel) == (4, (4,), False)
    assert space_of("--etp", "2,4").etp == (2, 4)


@pytest.mark.parametrize(
    ("name", "length", "positions"),
    [("GPT2", 4096, 4096), ("gpt2", 1025, 1025), ("gpt2", 1024, 1024), ("gpt2", 8, 1024)],
)
def test_a_named_model_learns_as_many_positions_as_it_needs(name, length, positions):
    asked = read_request(parser().parse_args(["--model", name, *NEEDED[2:-1], str(length)]))
    assert asked.model.positions == positions and asked.model.layers == 12


def test_a_llama_learns_no_positions():
    llama = read_request(parser().parse_args(["--model", "llama-7b", *NEEDED[2:]]))
    assert llama.model.positions == 0


def test_a_question_is_what_the_flags_say():
    flags = (
        "--gpus-per-node 4 --dp 2 --tp 2 --pp 2 --microbatch 4 --program nanotron --precision bf16 --attention flash"
    )
    asked = read_request(parser().parse_args([*NEEDED, *flags.split()]))
    assert (asked.name, asked.gpu, asked.program) == ("gpt2", "a100", "nanotron")
    assert (asked.global_batch, asked.length, asked.tokens, asked.precision) == (16, 1024, 16 * 1024, "bf16")
    program = PROGRAMS["nanotron"]
    assert asked.cluster == Cluster(GPUS["a100"], 8, 4, program.assumptions, program.framework)
    assert (asked.spread, asked.evidence) == (program.spread, program.evidence)
    space = asked.space
    assert (space.dp, space.tp, space.pp, space.microbatch, space.attention) == (2, 2, 2, 4, "flash")


def test_a_model_with_one_position_learns_no_second(tmp_path, capsys):
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    own = ["--model", str(tmp_path), *NEEDED[2:-1]]
    assert refused(capsys, *own, "2") == f"--seq-len 2: {tmp_path} has 1 learned positions"
    assert main([*own, "1", "--tp", "1", "--pp", "1", "--microbatch", "1"]) == 0
