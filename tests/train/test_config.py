"""The command line: what it gives, and one clear line for whatever is wrong with it."""

import dataclasses
import os

import pytest

from minipar.errors import UsageError
from minipar.train.config import (
    TrainConfig,
    check,
    check_heads,
    parse,
    prepare_outputs,
    progress_stream,
    resolve,
    with_shape,
)
from minipar.train.options import flags, inside


def told(argv: str, rank: int = 0) -> TrainConfig:
    return parse(argv.split(), rank)


def refused(argv: list[str]) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_flags_it_is_the_defaults():
    assert told("") == TrainConfig()
    check(TrainConfig())


def test_every_flag_arrives_where_it_belongs():
    expected = {
        "--dp": 8, "--layers": 3, "--hidden": 96, "--heads": 6, "--seq-len": 48, "--vocab-size": 300, "--data": "a.txt",
        "--order": "sequential", "--global-batch": 24, "--microbatches": 2, "--steps": 20, "--lr": 3e-4,
        "--lr-schedule": "cosine", "--warmup-steps": 5, "--betas": (0.8, 0.95), "--eps": 1e-7, "--weight-decay": 0.1,
        "--clip-grad": 1.0, "--seed": 7, "--dtype": "float64", "--device": "cuda", "--recompute": "full",
        "--reduction": "ordered", "--metrics": "m.jsonl", "--trace": "t.json", "--clock": "cpu",
        "--network": (1e-6, 1e-9), "--export": "d", "--zero-stage": 2, "--memory-limit": 5000,
        "--memory": "l.json", "--tp": 2, "--dropout": 0.1, "--save": "c", "--save-every": 5, "--resume": "c",
    }  # fmt: skip
    argv = [
        str(word)
        for flag, value in expected.items()
        for word in (flag, *(value if isinstance(value, tuple) else [value]))
    ]
    given = {
        flag: value
        for _, _, flag, value in flags(parse([*argv, "--verify", "--sync-every-microbatch", "--sequence-parallel"]))
    }
    assert given == expected | {
        "--verify": True,
        "--sync-every-microbatch": True,
        "--sequence-parallel": True,
        "--init-from": None,
        "--pp": 1,
        "--schedule": None,
        "--virtual-stages": None,
    }
    mesh = told("--pp 4 --schedule interleaved-1f1b --virtual-stages 3").mesh
    assert (mesh.pp, mesh.schedule, mesh.virtual_stages) == (4, "interleaved-1f1b", 3)
    assert told("--init-from gpt2 --seq-len 32").model.init_from == "gpt2"


def test_the_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().data.global_batch = 3


def test_help_names_every_flag_on_rank_0_only(capsys):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as left:
            told("--help", rank)
        assert left.value.code == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        missing = [flag for _, _, flag, _ in flags(TrainConfig()) if flag not in printed.out]
        assert missing == [] if rank == 0 else printed.out == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--bogus 3", "unrecognized arguments: --bogus 3"),
        ("--hid 32", "unrecognized arguments: --hid 32"),
        ("--dtype float8", "argument --dtype: invalid choice: 'float8'"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--steps 1.5", "argument --steps: invalid int value: '1.5'"),
        ("--steps", "argument --steps: expected one argument"),
        ("--betas 0.9", "argument --betas: expected 2 arguments"),
        ("--lr nan", "--lr nan is outside (0, inf)"),
        ("--lr inf", "--lr inf is outside (0, inf)"),
        ("--lr 0", "--lr 0.0 is outside (0, inf)"),
        ("--lr -0.001", "--lr -0.001 is outside (0, inf)"),
        ("--steps 0", "--steps 0 is outside [1, inf)"),
        ("--layers -2", "--layers -2 is outside [1, inf)"),
        ("--dp 0", "--dp 0 is outside [1, inf)"),
        ("--betas 0.9 1", "--betas 1.0 is outside [0, 1)"),
        ("--betas nan 0.9", "--betas nan is outside [0, 1)"),
        ("--eps 0", "--eps 0.0 is outside (0, inf)"),
        ("--weight-decay -0.1", "--weight-decay -0.1 is outside [0, inf)"),
        ("--clip-grad nan", "--clip-grad nan is outside [0, inf)"),
        ("--seed -1", "--seed -1 is outside [0, 1.8e19]"),
        ("--warmup-steps 30 --steps 20", "warmup-steps 30 is more than steps 20: the learning rate would never reach"),
        ("--hidden 64 --heads 5", "hidden 64 is not divisible by heads 5"),
        ("--init-from d --layers 3", "--layers and --init-from both give the model's shape"),
        ("--init-from d --vocab-size 3", "--vocab-size and --init-from both give the model's shape"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_numbers(argv, line):
    assert refused(argv.split()).startswith(line)


@pytest.mark.parametrize("flag", ["--data", "--init-from", "--metrics", "--trace", "--export"])
def test_an_empty_path_is_refused(flag):
    assert refused([flag, ""]).startswith(f"{flag} is empty; expected ")


def test_a_choice_is_checked_without_the_command_line_too():
    config = TrainConfig()
    wrong = dataclasses.replace(config, run=dataclasses.replace(config.run, dtype="int8"))
    with pytest.raises(UsageError, match="--dtype int8: choose from float32, float64"):
        check(wrong)


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0, "[0, 1)", True), (1, "[0, 1)", False), (0, "(0, inf)", False), (1e300, "(0, inf)", True),
        (float("inf"), "(0, inf)", False), (float("nan"), "[0, 1]", False), (1, "[0, 1]", True),
    ],
)  # fmt: skip
def test_intervals_are_those_of_mathematics(value, interval, expected):
    assert inside(value, interval) is expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_dp_takes_all_ranks(ranks):
    assert resolve(told(f"--global-batch {4 * ranks}"), ranks).mesh.dp == ranks


@pytest.mark.parametrize(
    ("argv", "ranks", "line"),
    [
        ("--dp 3", 8, "dp*tp*pp = 3*1*1 = 3, but mpirun started 8 ranks"),
        ("--dp 8", 1, "dp*tp*pp = 8*1*1 = 8, but mpirun started 1 ranks"),
        ("--global-batch 10 --microbatches 3", 4, "global-batch 10 is not divisible by dp*microbatches = 4*3 = 12"),
        ("--global-batch 8 --microbatches 3", 4, "global-batch 8 is not divisible by dp*microbatches = 4*3 = 12"),
        ("--global-batch 7", 2, "global-batch 7 is not divisible by dp*microbatches = 2*1 = 2"),
    ],
)
def test_mesh_and_batch_must_divide(argv, ranks, line):
    with pytest.raises(UsageError) as caught:
        resolve(told(argv), ranks)
    assert str(caught.value) == line


def test_a_directory_gives_the_shape_and_must_have_room_for_the_sequence():
    config = told("--init-from d --seq-len 16")
    shaped = with_shape(config, layers=3, hidden=48, heads=4, vocab_size=99, positions=16)
    assert (shaped.model.layers, shaped.model.hidden, shaped.model.heads, shaped.model.vocab_size) == (3, 48, 4, 99)
    assert shaped.model.seq_len == 16
    with pytest.raises(UsageError, match="seq-len 16 is longer than the 8 positions of d"):
        with_shape(config, layers=3, hidden=48, heads=4, vocab_size=99, positions=8)
    with pytest.raises(UsageError, match="hidden 48 is not divisible by heads 5"):
        with_shape(config, layers=3, hidden=48, heads=5, vocab_size=99, positions=16)
    check_heads(shaped.model)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def outputs(**paths: object) -> TrainConfig:
    return parse([text for name, path in paths.items() for text in (f"--{name}", str(path))])


def test_output_directories_are_made_and_earlier_files_kept(tmp_path):
    (tmp_path / "m.jsonl").write_text("earlier\n")
    prepare_outputs(outputs(metrics=tmp_path / "m.jsonl", trace=tmp_path / "a/b/t.json", export=tmp_path / "model"))
    assert (tmp_path / "m.jsonl").read_text() == "earlier\n"
    assert (tmp_path / "a/b/t.json").is_file() and list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics", "trace", "export"])
def test_what_cannot_be_written_is_refused_before_training(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"^--{name} .*file/x cannot be written: "):
        prepare_outputs(outputs(**{name: tmp_path / "file/x"}))
    with pytest.raises(UsageError, match=f"^--{name} "):
        prepare_outputs(outputs(**{name: "/proc/self/no/x" if os.path.isdir("/proc/self") else "/dev/null/x"}))
    if name != "export":
        with pytest.raises(UsageError, match=f"^--{name} .* is a directory; expected a file"):
            prepare_outputs(outputs(**{name: tmp_path}))


def test_two_outputs_need_two_files(tmp_path):
    with pytest.raises(UsageError, match="--metrics and --trace would both write"):
        prepare_outputs(outputs(metrics=tmp_path / "x", trace=tmp_path / "." / "x"))


def test_metrics_on_standard_output_leave_it_to_themselves(capsys):
    config = told("--metrics -")
    prepare_outputs(config)
    assert not os.path.exists("-")
    print("progress", file=progress_stream(config))
    assert capsys.readouterr() == ("", "progress\n")
    print("progress", file=progress_stream(told("")))
    assert capsys.readouterr() == ("progress\n", "")
