"""Claims about size: library and tests are small, and a strategy can be followed without reading the rest."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The most tokens of each part, without comments and docstrings. A limit is lowered when code leaves, and only raised
# when code moves here from another part. The core's was raised by 700, for programs in Python on a GPU.
PARTS = {"core": 51_360, "more": 16_410, "train": 9_500, "compare": 6_360, "plan": 21_400, "bench": 8_820}
# The most files that the imports of a file reach, the most tokens in them, and how many of these are in parallel/.
CLOSURES = {
    "parallel/ddp": (22, 19_950, 4_270),
    "parallel/zero": (23, 20_470, 4_780),
    "parallel/fsdp": (23, 21_270, 5_580),
    "parallel/tensor/layers": (22, 21_400, 2_910),
    "parallel/pipeline/module": (27, 28_910, 9_870),
}
TOKENS_PER_LINE = 9.54
TEST_LINES = 32_180  # of all files below tests/; the goal is 30,000
LONG_LINES = 0.06  # of the lines that are not blank, beyond 100 columns

IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "minipar").rglob("*.py")}


@cache
def code_of(path):
    """Return (tokens, lines of code) of a file, without comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    tokens = [token for token in read if token.type not in IGNORED and token.start[0] not in documented]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(tokens), len(lines)


def part_of(name):
    """Return the part of the library that a module belongs to."""
    package = name.split(".")[1] if "." in name else ""
    if package == "generate":
        return "train"
    return package if package in PARTS else "core"


def imported_by(name):
    """Return the modules of minipar that a module imports, its functions included, but no `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    # `from minipar.autograd import backward` executes the package's own file; other packages load names when asked.
    if "minipar.autograd" in found:
        found.add("minipar.autograd.__init__")
    return found & FILES.keys()


def closure(name):
    """Return the modules that a reader of this one must be able to follow, itself included."""
    seen = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imported_by(module)
    return seen


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_library_holds_few_tokens(part):
    assert sum(code_of(path)[0] for name, path in FILES.items() if part_of(name) == part) <= PARTS[part]


def test_the_tests_are_few():
    files = (ROOT / "tests").rglob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= TEST_LINES


def test_a_strategy_can_be_followed_without_the_rest():
    found = {}
    for name, limits in CLOSURES.items():
        modules = closure(f"minipar.{name.replace('/', '.')}")
        tokens = {module: code_of(FILES[module])[0] for module in modules}
        inside = sum(count for module, count in tokens.items() if module.startswith("minipar.parallel."))
        sizes = (len(modules), sum(tokens.values()), inside)
        if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
            found[name] = sizes
    assert found == {}


def test_readme_says_what_a_strategy_takes_to_read():
    rows = re.findall(r"^\| `([\w/]+)\.py` \| (\d+) \| (\d+) \| ([\d,]+) \|$", (ROOT / "README.md").read_text(), re.M)
    expected = []
    for name in CLOSURES:
        modules = closure(f"minipar.{name.replace('/', '.')}")
        inside = sum(module.startswith("minipar.parallel.") for module in modules)
        tokens = round(sum(code_of(FILES[module])[0] for module in modules), -2)
        expected.append((name, str(len(modules)), str(inside), f"{tokens:,}"))
    assert rows == expected


def test_lines_say_little_at_once():
    library = [path for name, path in FILES.items() if part_of(name) not in ("plan", "bench")]
    sizes = [code_of(path) for path in library]
    assert sum(tokens for tokens, _ in sizes) <= TOKENS_PER_LINE * sum(lines for _, lines in sizes)
    lines = [line for path in library for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert sum(len(line) > 100 for line in lines) <= LONG_LINES * len(lines)
