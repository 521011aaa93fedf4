"""Claims of SECURITY.md about the code itself: files are data, and nothing in the code could execute one."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(path for package in ("minipar", "visualize") for path in (ROOT / package).rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}


def dangers(source: str) -> list[str]:
    """What in a source could turn a file's content into code: imports, calls, and NumPy's files with objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(node.func.id)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append("allow_pickle")
    return found


def test_no_file_is_executed_and_pickle_is_never_used():
    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in CODE}
    assert len(found) > 100 and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "import os.path, marshal",
        "eval('1')",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_each_way_to_execute_a_file_is_seen(source):
    assert dangers(source) and not dangers("np.load(x, allow_pickle=False)")
