"""Claims about the commands: a sub-command of `minipar` is the program that `python -m` runs; make names its tests."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from launcher import ROOT, run_each, run_mpi

from minipar.__main__ import COMMANDS
from minipar.train.config import parse

TINY = "--layers 1 --hidden 16 --heads 2 --seq-len 16 --global-batch 6 --steps 2 --reduction ordered".split()


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_installed_command_is_python_m_minipar():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["minipar"]
    module, _, name = script.partition(":")
    assert callable(getattr(import_module(module), name)) and module == "minipar.__main__"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_minipar_alone_lists_its_commands(argv):
    result = run("minipar", *argv)
    assert result.returncode == 0 and result.stderr == ""
    assert all(
        f"\n  {name} " in result.stdout and f"python -m {COMMANDS[name][0]}" in result.stdout for name in COMMANDS
    )


def test_a_command_is_the_program_of_its_module():
    commands = [["minipar", name, "--nonsense"] for name in COMMANDS]
    programs = [[module, "--nonsense"] for module, _ in COMMANDS.values()]
    results = run_each(1, [*commands, *programs])
    for wrong, same in zip(results[: len(COMMANDS)], results[len(COMMANDS) :], strict=True):
        assert wrong.returncode == same.returncode == 2 and wrong.stderr == same.stderr != ""


def test_the_command_trains_under_mpirun():
    result = run_mpi(3, ["-m", "minipar", "train", *TINY, "--verify"])
    assert result.returncode == 0 and "3 ranks = 1 device, bit for bit" in result.stdout, result.stderr


def test_an_unknown_command_is_one_line_with_a_suggestion():
    assert run("minipar", "trian").stderr == "minipar: error: minipar trian: no such command; did you mean train?\n"
    result = run_mpi(3, ["-m", "minipar", "xyz"])
    assert result.returncode == 2 and result.stdout == ""
    assert (
        result.stderr
        == "minipar: error: minipar xyz: no such command; expected train, plan, generate, compare, bench, visualize\n"
    )
    assert run_mpi(3, ["-m", "minipar"]).stdout.count("usage:") == 1


def demo() -> list[str]:
    """Return the commands of `make demo`."""
    argv = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.base", "demo"]
    lines = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return lines.replace("\\\n", " ").splitlines()


def test_the_demo_asks_for_a_proof_and_continues_its_text():
    train, traced = (line for line in demo() if "-m minipar.train" in line)
    for line in train, traced:
        argv = shlex.split(line.partition("-m minipar.train")[2].partition(" > ")[0])
        config = parse(argv)
        mesh = config.mesh
        assert mesh.dp * mesh.tp * mesh.pp == 8 and config.data.path == "out/demo.txt"
    assert "--verify" in train and any("'import this' > out/demo.txt" in line for line in demo())


@pytest.mark.long
def test_one_device_learns_the_demos_text_by_heart(tmp_path):
    train = next(line for line in demo() if "-m minipar.train" in line)
    argv = shlex.split(train.partition("-m minipar.train")[2])
    zen = run("this").stdout
    (tmp_path / "demo.txt").write_text(zen)
    for flag in ("--dp", "--tp", "--pp", "--zero-stage", "--metrics"):
        del argv[argv.index(flag) : argv.index(flag) + 2]
    argv = [each for each in argv if each not in ("--sequence-parallel", "--verify")]
    argv[argv.index("--data") + 1] = str(tmp_path / "demo.txt")
    argv[argv.index("--export") + 1] = str(tmp_path / "model")
    command = [sys.executable, "-m", "minipar.train", *argv]
    trained = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert trained.returncode == 0, trained.stderr
    written = run(
        "minipar.generate", "--from", str(tmp_path / "model"), "--prompt", "Beautiful", "--tokens", "200"
    ).stdout
    right = sum(word in zen.split() for word in written.split())
    assert right / len(written.split()) > 0.9, written


def test_make_quick_names_a_test_of_each_package():
    text = re.search(r"^QUICK := \$\(addprefix tests/,(.*?)\)", (ROOT / "Makefile").read_text(), re.M | re.S)[1]
    named = [name.partition("::") for name in text.replace("\\", "").split()]
    for path, _, test in named:
        assert (ROOT / "tests" / path).is_file() and f"def {test}" in (ROOT / "tests" / path).read_text()
    packages = {path.split("/")[0] for path, _, _ in named}
    assert packages == {"autograd", "nn", "comm", "parallel", "train", "plan", "visualize"}
