"""Claims about the wheel: it holds the library with its pictures, nothing else, and works far from a checkout."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launcher import ROOT


def run(*command, folder):
    """Run a command in a folder, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the files that go into it: a build writes beside them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "minipar", "visualize", "chapters"):
        run("cp", "-r", str(ROOT / name), str(copy), folder=ROOT)
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    run(*build, str(copy / "out"), ".", folder=copy)
    (path,) = (copy / "out").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The directory of the programs of a new environment with the wheel, and with this one's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    install = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet")
    run(*install, "--no-deps", "--no-index", str(wheel), folder=folder)
    # A path in this file is searched, but the files of paths in it, such as the checkout's, are not read.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin"


def test_the_wheel_has_one_package_and_all_its_modules(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    assert {name.parts[0].split("-")[0] for name in names} == {"minipar"}
    modules = {path.relative_to(ROOT) for path in (ROOT / "minipar").rglob("*.py")}
    modules |= {Path("minipar") / path.relative_to(ROOT) for path in (ROOT / "visualize").rglob("*.py")}
    assert {name for name in names if name.suffix == ".py"} == modules


def test_an_installed_minipar_trains_plans_and_draws(installed, tmp_path):
    minipar = str(installed / "minipar")
    train = "train --steps 2 --layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 2".split()
    assert "step 2/2" in run(minipar, *train, "--metrics", "loss.jsonl", folder=tmp_path)
    plan = "plan --model gpt2-xl --gpus 8 --gpu h100 --global-batch 64 --seq-len 2048".split()
    assert "dp" in run(minipar, *plan, folder=tmp_path)
    run(minipar, *"visualize loss loss.jsonl --out loss.png".split(), folder=tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    where = run(str(installed / "python"), "-c", "import minipar; print(minipar.__file__)", folder=tmp_path)
    assert str(ROOT) not in where


def test_an_installed_minipar_compares_two_runs(installed, tmp_path):
    minipar = str(installed / "minipar")
    train = "train --steps 1 --layers 1 --hidden 8 --heads 2 --seq-len 8 --global-batch 2 --record".split()
    run(minipar, *train, "a", folder=tmp_path)
    run(minipar, *train, "b", folder=tmp_path)
    assert "equal within rounding" in run(minipar, "compare", "a", "b", folder=tmp_path)
