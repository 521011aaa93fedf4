"""Claims about the commands: a sub-command of `minipar` is the program that `python -m` runs, also under mpirun."""

import shlex
import subprocess
import tomllib
from importlib import import_module

from launcher import ROOT, run_each, run_mpi

from minipar.__main__ import COMMANDS
from minipar.train.flags import parse

TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 2 --reduction ordered".split()


def test_the_installed_command_is_python_m_minipar():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["minipar"]
    module, _, name = script.partition(":")
    assert callable(getattr(import_module(module), name)) and module == "minipar.__main__"


def test_a_command_is_the_program_of_its_module():
    commands = [["minipar", name, "--nonsense"] for name in COMMANDS]
    modules = [f"minipar.{name}" for name in COMMANDS if name != "visualize"] + ["visualize"]
    programs = [[module, "--nonsense"] for module in modules]
    alone, unknown, *results = run_each(1, [["minipar"], ["minipar", "trian"], *commands, *programs])
    assert alone.returncode == 0 and all(f"\n  {name} " in alone.stdout for name in COMMANDS)
    assert unknown.returncode == 2 and unknown.stderr.count("\n") == 1
    assert "trian" in unknown.stderr and "train" in unknown.stderr
    for wrong, same in zip(results[: len(COMMANDS)], results[len(COMMANDS) :], strict=True):
        assert wrong.returncode == same.returncode == 2 and wrong.stderr == same.stderr != ""


def test_the_command_trains_under_mpirun():
    result = run_mpi(3, ["-m", "minipar", "train", *TINY, "--verify"])
    assert result.returncode == 0 and "3 ranks = 1 device bit for bit" in result.stdout, result.stderr


def test_the_demos_commands_are_possible():
    argv = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.base", "demo"]
    text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = text.replace("\\\n", " ").splitlines()
    train, traced = (line for line in lines if "-m minipar.train" in line)
    for line in train, traced:
        args = parse(shlex.split(line.partition("-m minipar.train")[2].partition(" > ")[0]), 8)
        assert args.dp * args.tp * args.pp == 8
    assert "--verify" in train
