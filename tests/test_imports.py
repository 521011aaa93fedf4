"""The arrows of the design: imports go downwards only, nn and comm never meet, and a few doors have one keeper each."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each room may import, besides itself. A room that is not listed may not exist.
ALLOWED = {
    "minipar.errors": set(),
    "minipar.__main__": {"errors"},
    "minipar.backend": {"errors"},
    "minipar.memory": {"backend"},
    "minipar.autograd": {"errors", "backend", "memory"},
    "minipar.nn": {"errors", "backend", "memory", "autograd"},
    "minipar.comm": {"errors", "backend", "memory"},
    "minipar.parallel": {"errors", "backend", "memory", "autograd", "nn", "comm"},
    "minipar.train": {"errors", "backend", "memory", "autograd", "nn", "comm", "parallel"},
    "minipar.plan": {"errors", "nn", "parallel"},
    "minipar.bench": {"errors", "backend", "memory", "autograd", "nn", "comm", "parallel", "train", "plan"},
    "visualize": {"errors", "parallel"},
}

# Packages from outside, and the rooms that may name them.
OUTSIDE = {
    "numpy": {"minipar", "visualize"},
    "cupy": {"minipar.backend"},
    "threadpoolctl": {"minipar.backend"},
    "mpi4py": {"minipar.comm"},
    "safetensors": {"minipar.nn", "minipar.train"},
    "torch": {"minipar.bench"},
    "matplotlib": {"visualize"},
    "IPython": {"visualize"},
    "ipywidgets": {"visualize"},
}


def imported(source: str, package: str) -> set[str]:
    """Absolute names that a module of `package` imports, `from a import b` as "a.b"; those in functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str:
    """minipar.comm.ring -> minipar.comm; visualize.loss -> visualize."""
    return ".".join(module.split(".")[: 2 if module.startswith("minipar.") else 1])


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `module` that go against the arrows."""
    here = room(module)
    found = []
    for name in sorted(imported(source, module if is_package else module.rpartition(".")[0])):
        top = name.split(".")[0]
        if room(name) == here or top in sys.stdlib_module_names:
            continue
        if top == "minipar":
            allowed = room(name).removeprefix("minipar.") in ALLOWED.get(here, set()) or name == "minipar.__version__"
        elif top == "visualize":
            allowed = False
        else:
            allowed = any(here == keeper or here.startswith(keeper + ".") for keeper in OUTSIDE.get(top, set()))
        if not allowed:
            found.append(f"{module} imports {name}")
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("minipar", "visualize")
    for path in sorted((ROOT / package).rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    path = MODULES[module]
    if module == "minipar":
        assert imported(path.read_text(), "minipar") <= {"os"}, "it runs before NumPy is loaded"
        return
    assert room(module) in ALLOWED, f"{room(module)} is a new room: say what it may import"
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_the_rooms_are_found():
    assert {"minipar.nn", "minipar.comm", "minipar.train.config", "visualize.timeline"} <= set(MODULES)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minipar.nn.layers", "from minipar.comm import Communicator"),
        ("minipar.nn.layers", "import minipar.comm.mpi"),
        ("minipar.nn.layers", "from minipar import comm"),
        ("minipar.nn.layers", "from ..comm import mesh"),
        ("minipar.nn.layers", "from .. import parallel"),
        ("minipar.nn.layers", "def late():\n    from minipar.parallel import data"),
        ("minipar.comm.mesh", "from minipar.nn import GPT"),
        ("minipar.comm.mesh", "from minipar.autograd import Tensor"),
        ("minipar.autograd.tensor", "from minipar.nn import Module"),
        ("minipar.backend", "import minipar.autograd"),
        ("minipar.parallel.data", "from minipar.train.config import TrainConfig"),
        ("minipar.nn.gpt", "import torch"),
        ("minipar.nn.gpt", "import cupy"),
        ("minipar.train.trainer", "from mpi4py import MPI"),
        ("minipar.train.trainer", "from visualize import plot_loss"),
        ("visualize.loss", "from minipar.train import trainer"),
        ("visualize.loss", "if True:\n    import minipar.nn"),
    ],
)
def test_an_import_against_the_arrows_is_seen(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "minipar.nn.layers",
            "from minipar.autograd import tensor\nfrom .module import Module\nimport numpy as np, math",
        ),
        ("minipar.parallel.data", "from minipar.comm import mesh\nfrom ..nn.module import Module"),
        ("minipar.comm.mpi", "from mpi4py import MPI\nfrom minipar import errors"),
        ("visualize.timeline", "from visualize.style import save\nfrom minipar.errors import UsageError"),
    ],
)
def test_an_import_along_the_arrows_passes(module, source):
    assert violations(source, module) == []


# ---- the serial model knows no ranks ---------------------------------------------------------------------------------

# Words of the rooms above. Prose in nn and autograd may use them, to say why a thing is as it is; code may not.
WORDS = re.compile(r"\b(ranks?|comm|communicators?|mesh|world|mpi|mpirun)\b", re.IGNORECASE)


def code_words(source: str) -> list[str]:
    """The identifiers of a file that are words of parallelism: comments and strings are not code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    parts = [part for t in tokens if t.type == tokenize.NAME for part in [t.string, *t.string.split("_")]]
    return [part for part in parts if WORDS.fullmatch(part)]


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in ("minipar.nn", "minipar.autograd")])
def test_the_serial_models_code_names_no_rank_and_no_communicator(module):
    assert code_words(MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("source", ["x = comm.rank", "def f(rank): pass", "def f(tp_rank): pass", "from a import mesh"])
def test_a_rank_in_code_is_seen(source):
    assert code_words(source)
    assert code_words('"""A rank, in prose."""\nx = 1  # of a rank\n') == []
