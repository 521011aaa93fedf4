"""Claims about imports: they point down and form no cycle, strategies and the serial model know no ranks of others."""

import ast
import re
import sys
import tokenize
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each package of minipar may import, besides itself. A package that is not listed may not exist. A program, a
# `__main__`, may import all of them.
CORE = "errors cli backend memory memory_file process autograd nn comm parallel"
ALLOWED = {
    "errors": "",
    "cli": "errors",
    "__main__": "errors",
    "backend": "errors",
    "memory": "backend",
    "memory_file": "memory",
    "autograd": "errors backend memory",
    "nn": "errors backend memory autograd",
    "process": "",
    "comm": "errors backend memory process",
    "parallel": "errors backend memory autograd nn comm",
    "more": "errors backend memory autograd nn comm parallel",
    "train": f"{CORE} more",
    "generate": f"{CORE} more train",
    "compare": f"{CORE} more train",
    "plan": f"{CORE} more train",
    "bench": f"{CORE} more train plan",
    "visualize": f"{CORE} compare",
}
# Packages from outside, and the packages that may name them.
OUTSIDE = {
    **dict.fromkeys(("cupy", "ml_dtypes"), {"backend"}),
    "threadpoolctl": {"process"},
    **dict.fromkeys(("matplotlib", "IPython", "ipywidgets"), {"visualize"}),
    "numpy": set(ALLOWED),
    "lazy_loader": set(ALLOWED),
    "mpi4py": {"comm", "bench"},
    "safetensors": {"train"},
    "torch": {"bench"},
}
# Inside minipar.parallel: no strategy, a file or a folder, imports another one, and no helper imports a strategy.
STRATEGIES = {"ddp", "zero", "zero_optimizer", "fsdp", "tensor", "pipeline"}
MEETING = {"", "wrap", "layout", "predicted_traffic"}  # where strategies meet
ZERO = {"zero", "zero_optimizer", "fsdp", "chunks"}  # chunks.py is for the ZeRO stages

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("minipar", "visualize")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(module: str) -> set[str]:
    """Absolute names that a module imports, `from a import b` as "a.b"; those in functions too."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def part(name: str, place: int) -> str:
    """One part of a dotted name, or "" where it has none: part 1 of minipar.nn.gpt is nn."""
    return f"{name}...".split(".")[place]


def package_of(name: str) -> str:
    """The package of a module, an imported name, or a package from outside: nn of minipar.nn.gpt, torch of torch.nn."""
    return part(name, 1) if part(name, 0) == "minipar" else part(name, 0)


@pytest.mark.parametrize("module", [module for module in MODULES if module != "minipar"])
def test_imports_point_down(module):
    own = package_of(module)
    above = ALLOWED if module.endswith("__main__") else {}
    wrong = []
    for name in imported(module):
        other = package_of(name)
        if part(name, 0) in ("minipar", "visualize"):
            allowed = other in (own, "__version__", *ALLOWED[own].split(), *above)
        else:
            allowed = other in sys.stdlib_module_names or own in OUTSIDE.get(other, ())
        if not allowed:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("minipar.parallel")])
def test_strategies_do_not_import_each_other(module):
    own = part(module, 2)
    others = {part(name, 2) for name in imported(module) if name.startswith("minipar.parallel.")} - {own}
    assert own in MEETING or not others & STRATEGIES
    assert "chunks" not in others or own in ZERO


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("minipar.more.")])
def test_later_axes_do_not_import_each_other(module):
    axes = {"experts", "context", "tree"} - {part(module, 2)}
    assert {part(name, 2) for name in imported(module) if name.startswith("minipar.more.")} & axes == set()


def test_no_module_imports_itself_by_way_of_others():
    edges = {}
    for module in MODULES:
        targets = {name if name in MODULES else name.rpartition(".")[0] for name in imported(module)}
        edges[module] = (targets & MODULES.keys()) - {module}
    assert len(list(TopologicalSorter(edges).static_order())) == len(MODULES)  # CycleError names a cycle


# Words of parallelism. Prose in nn and autograd may say why a thing is as it is; its code may not use them.
WORDS = re.compile(r"ranks?|comm|communicators?|mesh|world|mpi|mpirun", re.IGNORECASE)


@pytest.mark.parametrize("module", [module for module in MODULES if part(module, 1) in ("nn", "autograd")])
def test_the_serial_models_code_names_no_rank_and_no_comm(module):
    with MODULES[module].open("rb") as file:
        names = {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
    assert [name for name in names if any(map(WORDS.fullmatch, name.split("_")))] == []


def test_the_wheel_gets_every_package():
    """`make release` builds it. A folder that is not listed is missing there, and nowhere else."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"]) - {"minipar.visualize"}
    assert listed == {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "minipar").rglob("*.py")}
