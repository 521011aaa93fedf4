"""Claims about imports: they point down, form no cycle, keep strategies apart, and leave little to read for ddp.py."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each package may import, besides itself. A package that is not listed may not exist.
ALLOWED = {
    "minipar.hints": set(),
    "minipar.pictures": set(),
    "minipar.errors": set(),
    "minipar.cli": {"errors", "hints"},
    "minipar.__main__": {"errors", "hints", "pictures"},
    "minipar.backend": {"errors"},
    "minipar.memory": {"backend"},
    "minipar.lone_steps": set(),
    "minipar.autograd": {"errors", "backend", "memory"},
    "minipar.nn": {"errors", "backend", "memory", "lone_steps", "autograd"},
    "minipar.robust_start": {"errors"},
    "minipar.comm": {"errors", "backend", "memory", "lone_steps", "robust_start"},
    "minipar.parallel": {"errors", "backend", "memory", "autograd", "nn", "comm"},
    "minipar.record": set(),
    "minipar.compare": {"errors", "cli", "record"},
    "minipar.train": {
        "errors",
        "cli",
        "backend",
        "memory",
        "autograd",
        "nn",
        "comm",
        "parallel",
        "record",
        "robust_start",
    },
    "minipar.generate": {"errors", "cli", "backend", "autograd", "nn", "comm", "train"},
    "minipar.plan": {"errors", "cli", "hints", "nn", "parallel"},
    "minipar.bench": {
        "errors",
        "cli",
        "backend",
        "memory",
        "autograd",
        "nn",
        "comm",
        "parallel",
        "train",
        "plan",
        "robust_start",
    },  # fmt: skip
    "visualize": {"errors", "cli", "parallel", "record"},
}

# Packages from outside, and the packages that may name them.
OUTSIDE = {
    "numpy": {"minipar", "visualize"},
    "cupy": {"minipar.backend"},
    "threadpoolctl": {"minipar.backend"},
    "ml_dtypes": {"minipar.backend"},
    "psutil": {"minipar.robust_start"},
    "lazy_loader": {"minipar", "visualize"},
    "mpi4py": {"minipar.comm", "minipar.robust_start", "minipar.bench"},
    "safetensors": {"minipar.nn", "minipar.train"},
    "torch": {"minipar.bench"},
    "matplotlib": {"visualize"},
    "IPython": {"visualize"},
    "ipywidgets": {"visualize"},
}

# Inside minipar.parallel: each strategy, a file or a folder, imports itself and the shared helpers, which import one
# another. shards.py is for the ZeRO stages.
STRATEGIES = ("ddp", "zero", "zero_optimizer", "fsdp", "tensor", "pipeline", "context", "ulysses", "expert")
SHARED = (
    "placement",
    "buckets",
    "groups",
    "loss",
    "hybrid",
    "shards",
    "grad_norm",
    "exact_norm",
    "state",
    "guards",
    "split_guards",
    "step_guard",
    "tree",
    "token_order",
)
ZERO = ("zero", "zero_optimizer", "fsdp", "shards")

METHODS = {"context": "ulysses"}  # one of its methods has a file of its own

# What `import minipar.parallel.ddp` loads of minipar. Docstrings with at most 100 columns have more lines.
MOST_MODULES, MOST_LINES = 46, 6987


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


def package_of(module: str) -> str:
    """minipar.comm.ring -> minipar.comm; visualize.loss -> visualize."""
    return ".".join(module.split(".")[: 2 if module.startswith("minipar.") else 1])


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `module` that ALLOWED and OUTSIDE forbid."""
    own = package_of(module)
    wrong = []
    for name in sorted(imported(source, module if is_package else module.rpartition(".")[0])):
        top = name.split(".")[0]
        if package_of(name) == own or top in sys.stdlib_module_names:
            continue
        if top == "minipar":
            allowed = package_of(name).removeprefix("minipar.") in ALLOWED.get(own, set())
            allowed = allowed or name == "minipar.__version__"
        elif top == "visualize":
            allowed = False
        else:
            allowed = any(own == keeper or own.startswith(keeper + ".") for keeper in OUTSIDE.get(top, set()))
        if not allowed:
            wrong.append(f"{module} imports {name}")
    return wrong


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("minipar", "visualize")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def test_imports_point_down():
    inner = MODULES.keys() - {"minipar"}  # which has the public names of all packages
    new = {package_of(module) for module in inner} - ALLOWED.keys()
    assert not new, f"{new}: new packages: say what they may import"
    upward = {
        module: upward_imports(MODULES[module].read_text(), module, MODULES[module].name == "__init__.py")
        for module in inner
    }
    assert {module: names for module, names in upward.items() if names} == {}


def test_the_public_names_come_from_inside():
    outside = {name.split(".")[0] for name in imported(MODULES["minipar"].read_text(), "minipar")} - {"minipar"}
    assert outside <= {"lazy_loader"}


def test_the_packages_are_there():
    assert {"minipar.nn", "minipar.comm", "minipar.train.config", "visualize.timeline"} <= set(MODULES)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minipar.nn.layers", "from minipar.comm import Communicator"),
        ("minipar.nn.layers", "import minipar.comm.mpi"),
        ("minipar.nn.layers", "from minipar import comm"),
        ("minipar.nn.layers", "from ..comm import mesh"),
        ("minipar.nn.layers", "from .. import parallel"),
        ("minipar.nn.layers", "def late():\n    from minipar.parallel import ddp"),
        ("minipar.comm.communicator", "from minipar.nn import GPT"),
        ("minipar.comm.communicator", "from minipar.autograd import Tensor"),
        ("minipar.autograd.tensor", "from minipar.nn import Module"),
        ("minipar.backend", "import minipar.autograd"),
        ("minipar.parallel.ddp", "from minipar.train.config import TrainConfig"),
        ("minipar.parallel.ddp", "if TYPE_CHECKING:\n    from minipar.train.trainer import Trainer"),
        ("minipar.nn.gpt", "import torch"),
        ("minipar.nn.gpt", "import cupy"),
        ("minipar.train.trainer", "from mpi4py import MPI"),
        ("minipar.train.trainer", "from visualize import plot_loss"),
        ("visualize.loss", "from minipar.train import trainer"),
        ("visualize.loss", "if True:\n    import minipar.nn"),
    ],
)
def test_an_import_that_points_up_is_seen(module, source):
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minipar.nn.layers", "from minipar.autograd import tensor\nfrom .module import Module\nimport numpy"),
        ("minipar.parallel.ddp", "from minipar.comm import mesh\nfrom ..nn.module import Module"),
        ("minipar.comm.mpi", "from mpi4py import MPI\nfrom minipar import errors"),
        ("visualize.timeline", "from visualize.style import save\nfrom minipar.errors import UsageError"),
    ],
)
def test_an_import_that_points_down_passes(module, source):
    assert upward_imports(source, module) == []


# ---- strategies do not know one another ------------------------------------------------------------------------------


def strange_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports by which a strategy, or a helper that strategies share, knows a strategy that is not itself."""
    own = module.split(".")[2]
    if own not in STRATEGIES + SHARED:
        return []
    wrong = []
    for name in sorted(imported(source, module if is_package else module.rpartition(".")[0])):
        other = name.removeprefix("minipar.parallel.").split(".")[0] if name.startswith("minipar.parallel.") else own
        shared = other in SHARED and (other != "shards" or own in ZERO)
        if other != own and not shared and other != METHODS.get(own):
            wrong.append(f"{module} imports {name}")
    return wrong


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("minipar.parallel.")])
def test_strategies_do_not_import_each_other(module):
    assert strange_imports(MODULES[module].read_text(), module, MODULES[module].name == "__init__.py") == []


def test_the_strategies_and_their_helpers_are_there():
    names = {module.split(".")[2] for module in MODULES if module.startswith("minipar.parallel.")}
    assert names >= {*SHARED, "ddp", "zero", "fsdp", "tensor", "pipeline"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minipar.parallel.ddp", "from minipar.parallel.zero import ZeroStage1"),
        ("minipar.parallel.ddp", "from minipar.parallel import fsdp"),
        ("minipar.parallel.ddp", "from minipar.parallel.shards import Chunk"),
        ("minipar.parallel.ddp", "from minipar.parallel.traffic import StepLayout"),
        ("minipar.parallel.zero", "def late():\n    from .ddp import DistributedDataParallel"),
        ("minipar.parallel.tensor.layers", "from minipar.parallel.pipeline.stage import cut"),
        ("minipar.parallel.pipeline.stage", "if TYPE_CHECKING:\n    from ..tensor import TensorGroup"),
        ("minipar.parallel.step_guard", "from minipar.parallel.ddp import DistributedDataParallel"),
        ("minipar.parallel.placement", "from minipar.parallel.tensor.plan import PLAN"),
        ("minipar.parallel.ulysses", "from minipar.parallel.context import visible"),
    ],
)
def test_a_strategy_that_knows_another_one_is_seen(module, source):
    assert len(strange_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minipar.parallel.fsdp", "from minipar.parallel.shards import Chunk\nfrom minipar.nn import Module"),
        (
            "minipar.parallel.tensor.plan",
            "from minipar.parallel.tensor.layers import Border\nfrom ..placement import Shard",
        ),
        ("minipar.parallel.parallelize", "from minipar.parallel.ddp import DistributedDataParallel"),
    ],
)
def test_a_strategy_may_import_itself_and_the_shared_helpers(module, source):
    assert strange_imports(source, module) == []


# ---- cycles ----------------------------------------------------------------------------------------------------------


def graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """What each module imports of the others, wherever the import is written.

    `sources` is (source, whether it is a package's __init__) by module. `from a import b` is an import of a.b where
    that is a module, otherwise of a.
    """
    edges = {}
    for module, (source, is_package) in sources.items():
        names = imported(source, module if is_package else module.rpartition(".")[0])
        targets = {name if name in sources else name.rpartition(".")[0] for name in names}
        edges[module] = (targets & sources.keys()) - {module}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """For each module the shortest way through imports back to itself; a cycle is listed once."""
    listed = {}
    for start in edges:
        ways, queue = {start: [start]}, deque([start])
        while queue:
            module = queue.popleft()
            if start in edges[module]:
                way = ways[module]
                first = way.index(min(way))
                listed[frozenset(way)] = " -> ".join([*way[first:], *way[: first + 1]])
                break
            for other in sorted(edges[module] - ways.keys()):
                ways[other] = [*ways[module], other]
                queue.append(other)
    return sorted(listed.values())


def test_no_module_imports_itself_by_way_of_others():
    sources = {module: (path.read_text(), path.name == "__init__.py") for module, path in MODULES.items()}
    assert cycles(graph(sources)) == [], "\n".join(cycles(graph(sources)))


def test_a_cycle_is_seen_wherever_its_imports_are_written():
    sources = {
        "a": ("from a import b", True),
        "a.b": ("def late():\n    from a.c import f", False),
        "a.c": ("if TYPE_CHECKING:\n    from .b import g\nimport os", False),
        "a.d": ("from a import f", False),
        "a.e": ("from a.d import g", False),
    }
    assert cycles(graph(sources)) == ["a.b -> a.c -> a.b"]
    sources["a.c"] = ("from a import f", False)  # a name of the package itself, which imports a.b
    assert cycles(graph(sources)) == ["a -> a.b -> a.c -> a"]


# ---- what a reader of ddp.py may have to open ------------------------------------------------------------------------


def test_importing_ddp_loads_few_modules_and_few_lines():
    """Of minipar, package __init__ files included, in an interpreter that has loaded nothing else."""
    program = "import sys, minipar.parallel.ddp; print(*[m for m in sys.modules if m.split('.')[0] == 'minipar'])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = result.stdout.split()
    lines = sum(len(MODULES[module].read_text().splitlines()) for module in modules)
    assert "minipar.parallel.ddp" in modules
    assert not {"minipar.parallel.zero", "minipar.parallel.fsdp", "minipar.parallel.tensor"} & set(modules)
    assert len(modules) <= MOST_MODULES and lines <= MOST_LINES, f"{len(modules)} modules, {lines} lines: {modules}"


# ---- the serial model knows no ranks ---------------------------------------------------------------------------------

# Words of parallelism. Prose in nn and autograd may say why a thing is as it is ("keyed by name and never by a rank");
# its code may not use them.
WORDS = re.compile(r"\b(ranks?|comm|communicators?|mesh|world|mpi|mpirun)\b", re.IGNORECASE)


def code_words(source: str) -> list[str]:
    """The identifiers of a file that are words of parallelism: comments and strings are not code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    parts = [part for t in tokens if t.type == tokenize.NAME for part in [t.string, *t.string.split("_")]]
    return [part for part in parts if WORDS.fullmatch(part)]


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) in ("minipar.nn", "minipar.autograd")])
def test_the_serial_models_code_names_no_rank_and_no_comm(module):
    assert code_words(MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("source", ["x = comm.rank", "def f(rank): pass", "def f(tp_rank): pass", "from a import mesh"])
def test_a_rank_in_code_is_seen(source):
    assert code_words(source)
    assert code_words('"""A rank, in prose."""\nx = 1  # of a rank\n') == []
