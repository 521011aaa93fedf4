"""Claims about the answer to a flag or command that a program does not have: it names the one that was meant."""

import argparse
import re

import pytest

import minipar
from minipar import generate
from minipar.bench.__main__ import SUBCOMMANDS, bench
from minipar.comm.threads import serial
from minipar.compare import differences
from minipar.errors import UsageError
from minipar.hints import ELSEWHERE, letters, suggest, suggest_flag
from minipar.plan import __main__ as plan
from minipar.train.config import parse
from visualize import __main__ as visualize

DRAWINGS = "trace mesh loss traffic memory plan layouts compare schedule gallery".split()
COMMANDS = [
    "train",
    "plan",
    "generate",
    "compare",
    "bench",
    *(f"bench {name}" for name in SUBCOMMANDS),
    "visualize",
    *(f"visualize {name}" for name in DRAWINGS),
]


@pytest.fixture
def answer(capsys, monkeypatch):
    """A function that runs a command in this process, and returns the exit code and what it prints."""

    def run(command, *argv):
        name, *sub = command.split()
        words = [*sub, *argv]
        monkeypatch.setattr("sys.argv", ["program", *words])
        code, line = 0, ""
        try:
            if name == "train":
                parse(words)
            elif name == "bench":
                bench(serial())
            else:
                main = {"plan": plan, "generate": generate, "compare": differences, "visualize": visualize}[name].main
                code = main(words)
        except UsageError as error:
            code, line = 2, str(error)
        except SystemExit as leaving:
            code = leaving.code
        printed = capsys.readouterr()
        return code, printed.out, line or printed.err.removeprefix("minipar: error: ").rstrip("\n")

    return run


def flags_of(command, answer):
    """The flags in a command's help."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", answer(command, "--help")[1], re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_flag_is_answered_with_the_flag(command, answer):
    """Each flag with its last letter doubled, or in capitals if it has two; required ones are then missing, too."""
    flags = flags_of(command, answer)
    assert "--version" in flags
    for flag in flags:
        wrong = flag.upper() if len(flag) == len("--dp") else flag + flag[-1]
        code, out, line = answer(command, wrong, "x")
        assert (code, out) == (2, "") and line.endswith(f"; did you mean {flag}?"), (flag, line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_cannot_be_abbreviated(command, answer):
    """What works today would be ambiguous with tomorrow's flag."""
    code, out, line = answer(command, "--versio")
    assert (code, out) == (2, "") and "--version" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_names_the_program(command, answer):
    program = command.partition(" ")[0]
    code, text, _ = answer(command, "--help")
    assert code == 0 and re.match(rf"usage: [^\n]*{program}", text)


@pytest.fixture
def arguments(monkeypatch):
    """The arguments that parsers are given from now on."""
    added = []
    add = argparse.ArgumentParser.add_argument

    def remember(self, *names, **options):
        added.append(add(self, *names, **options))
        return added[-1]

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", remember)
    return added


def values(text):
    """The values that a text says in parentheses: "(8)", "(default 8)", "(256 512)"."""
    found = re.search(r"\((?:default:? )?((?:[\d.e-]+ ?)+)[,)]", text)
    return [float(word) for word in found.group(1).split()] if found else None


@pytest.mark.parametrize("command", ["plan", "generate", "compare", "bench", "visualize"])
def test_the_help_states_the_defaults_that_are_used(command, arguments, answer):
    answer(command, "--help")
    assert arguments
    for each in arguments:
        default = each.default if isinstance(each.default, list) else [each.default]
        if all(re.fullmatch(r"[\d.]+(e-?\d+)?", str(value)) for value in default) and each.default != []:
            assert values(each.help or "") == [float(value) for value in default], each.option_strings


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_version(command, answer):
    assert answer(command, "--version") == (0, f"minipar {minipar.__version__}\n", "")


@pytest.mark.parametrize("command", [name for name in COMMANDS if " " in name])
def test_a_misspelt_sub_command_is_answered_with_its_name(command, answer):
    program, name = command.split()
    code, out, line = answer(f"{program} {name[:-1]}")
    assert (code, out) == (2, "") and line.endswith(f"; did you mean {name}?")


BROUGHT = {
    "--batch-size": "--global-batch (the samples of all ranks)",
    "--zero": "--zero-stage",
    "--bf16": "--dtype bf16",
    "--fp16": "--dtype fp16",
    "--tensor-parallel-size": "--tp",
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--learning-rate": "--lr",
    "--learning_rate": "--lr",
    "--micro-batch-size": "--microbatches (how many, not how large)",
    "--global-batch-size": "--global-batch",
    "--per_device_train_batch_size": "--global-batch (the samples of all ranks)",
    "--gradient_accumulation_steps": "--microbatches",
    "--num-layers": "--layers",
    "--hidden-size": "--hidden",
    "--num-attention-heads": "--heads",
    "--seq-length": "--seq-len",
    "--train-iters": "--steps",
    "--max_iters": "--steps",
    "--block_size": "--seq-len",
    "--n_layer": "--layers",
    "--n_embd": "--hidden",
    "--n_head": "--heads",
    "--output_dir": "--save",
    "--nproc_per_node": "mpirun -n N",
    "--data-parallel-size": "--dp",
    "--max-model-len": "--seq-len",
    "-lr": "--lr",
}


@pytest.mark.parametrize("flag", BROUGHT)
def test_a_flag_of_another_program_is_answered_with_ours(flag, answer):
    assert answer("train", flag, "1")[2] == f"unrecognized arguments: {flag} 1; did you mean {BROUGHT[flag]}?"


def test_the_answer_is_a_flag_of_the_same_command(answer):
    assert "did you mean --precision bf16?" in answer("plan", "--bf16")[2]
    assert "did you mean --batch?" in answer("bench step", "--batch-size", "3")[2]
    assert "did you mean --microbatch?" in answer("plan", "--micro-batch-size", "3")[2]
    assert answer("compare", "a", "b", "--zero", "2")[2] == "unrecognized arguments: --zero 2"


def test_every_answer_is_a_flag_that_some_command_has(answer):
    flags = {flag for command in COMMANDS for flag in flags_of(command, answer)}
    for ours, theirs in ELSEWHERE.items():
        assert ours.split()[0] in flags | {"mpirun"}, ours
        for name in theirs.split():
            assert name == letters(name)
            assert name in ELSEWHERE[suggest_flag(f"--{name}", flags)].split()


def test_the_values_in_answers_are_accepted(answer):
    for ours in ELSEWHERE:
        flag, *value = ours.partition(" (")[0].split()
        if len(value) == 1 and flag in flags_of("train", answer) and value != ["flash"]:
            parse([flag, *value])
    given = "--model gpt2 --gpus 8 --gpu h100 --global-batch 8 --seq-len 1024 --attention flash".split()
    assert plan.main([*given, "--precision", "bf16"]) == plan.main([*given, "--precision", "fp16"]) == 0


def test_values_are_not_taken_for_flags(answer):
    """A negative value, what follows two dashes, and a text with a space."""
    assert answer("train", "--lr", "-1")[2].startswith("--lr -1")
    assert answer("bench modelled", "--flops", "0", "--", "--dp", "2")[2].count("did you mean") == 0
    assert answer("generate", "--from", "nowhere", "--prompt", "--from here")[2].count("did you mean") == 0


def test_a_suggestion_ignores_case_and_punctuation():
    names = ["gpt2", "llama-2-70b", "llama-3-70b", "llama-3-8b"]
    assert [suggest(name, names) for name in ("llama2-70b", "LLaMA-3-70B", "GPT-2", "llama_3_8b")] == [
        "llama-2-70b", "llama-3-70b", "gpt2", "llama-3-8b",
    ]  # fmt: skip
    assert suggest("mixtral", names) == ""


def test_a_name_of_which_seven_tenths_agree_is_suggested():
    """As difflib measures it: twice the letters that agree, over those of both."""
    assert suggest("abcdefgxyz", ["abcdefghij"]) == "abcdefghij"  # 14 of 20
    assert suggest("abcdefxyzw", ["abcdefghij"]) == ""  # 12 of 20
    assert suggest("layer", ["layers", "lawyers", "later"]) == "layers"  # the most alike
