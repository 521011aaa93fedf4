"""Claims about a fresh clone: dependencies are pinned, no file names a machine, and no code executes a file."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CODE = sorted(path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py"))

# ---- files -----------------------------------------------------------------------------------------------------------

PLACES = {
    "a package registry": r"pypi\.org|pythonhosted|download\.pytorch|conda\.anaconda",
    "an index option": r"--(extra-)?index-url|--find-links|PIP_(EXTRA_)?INDEX",
    "a file address": r"file://",
    "a home directory": r"(?<![\w.])/(root|home/\w+|Users/\w+)/",
    "this copy's directory": re.escape(f"{ROOT}/") if len(ROOT.parts) > 2 else "(?!)",
}


def project_files():
    """All files of the project but this one: git's list, or without git what .gitignore does not name."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        ignored = {".git", ".venv", "out", "build", "dist", "__pycache__"}
        paths = [path for path in ROOT.rglob("*") if not ignored & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def test_no_file_names_a_registry_or_a_machine():
    wrong = []
    for path in project_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        wrong += [f"{path}: {kind}" for kind, pattern in PLACES.items() if re.search(pattern, text)]
    assert wrong == []


# Imports and calls that could turn a file's content into code.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}


def dangers(source: str) -> list[str]:
    """What in a source could turn a file's content into code: imports, calls, and NumPy's files with objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if is_off else ["allow_pickle"]
    return found


def test_no_file_is_executed_and_pickle_is_never_used():
    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in CODE}
    assert {path: names for path, names in found.items() if names} == {}


# ---- dependencies ----------------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """Return a package name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Read constraints.txt, which has exact versions only: no ranges, addresses, or local versions such as +cpu."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    return {canonical(match[1]): match[2] for match in matches if match}


REQUIREMENTS = PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_dependency_is_pinned_within_its_range(requirement):
    wanted = Requirement(requirement)
    assert wanted.specifier, f"{requirement} has no range"
    assert wanted.specifier.contains(pins()[canonical(wanted.name)])


def test_the_makefiles_extras_are_there():
    makefiles = [path.read_text(encoding="utf-8") for path in [ROOT / "Makefile", *ROOT.glob("*/*/Makefile")]]
    named = re.findall(r"'(?:\.|\$\(\w+\))\[([\w,]+)\]'", "\n".join(makefiles))
    assert {extra for names in named for extra in names.split(",")} <= set(PROJECT["optional-dependencies"])
