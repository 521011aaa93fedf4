"""How dense a package's code is, how deep its classes are, and where it computes names of attributes.

`python tests/measures.py` prints today's values as rows for the tables of tests/test_measures.py.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = ("plan", "bench", "compare")  # tools around the library, which nothing in it needs
LONG = 100  # columns
# What ends a line, indents it or is left out.
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Density:
    """The size of some code. Comments, docstrings and blank lines are no code."""

    tokens: int = 0
    code_lines: int = 0
    lines: int = 0  # all but blank ones
    long_lines: int = 0  # of these, the ones beyond LONG columns

    def __add__(self, other: "Density") -> "Density":
        return Density(
            self.tokens + other.tokens,
            self.code_lines + other.code_lines,
            self.lines + other.lines,
            self.long_lines + other.long_lines,
        )

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.code_lines)

    @property
    def percent_long(self) -> float:
        return 100 * self.long_lines / max(1, self.lines)


def core(*packages: str) -> dict[str, str]:
    """Return the text of each file of minipar without plan, bench and compare, or of some of its packages."""
    texts = {}
    for path in sorted((ROOT / "minipar").rglob("*.py")):
        inside = path.relative_to(ROOT / "minipar").parts
        if inside[0] not in OUTSIDE and (not packages or inside[0] in packages):
            texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return texts


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines of docstrings."""
    numbers = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                numbers.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return numbers


def density(source: str) -> Density:
    """Measure one file."""
    docstrings = docstring_lines(source)
    tokens = 0
    code_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED and token.start[0] not in docstrings:
            tokens += 1
            code_lines.update(range(token.start[0], token.end[0] + 1))
    lines = [line for line in source.splitlines() if line.strip()]
    long_lines = [line for line in lines if len(line) > LONG]
    return Density(tokens, len(code_lines), len(lines), len(long_lines))


def densities(texts: Mapping[str, str]) -> dict[str, Density]:
    """Measure the folders of these files."""
    folders: dict[str, Density] = {}
    for name, source in texts.items():
        folder = name.rpartition("/")[0]
        folders[folder] = folders.get(folder, Density()) + density(source)
    return folders


def depths(texts: Mapping[str, str]) -> dict[str, int]:
    """Return how many classes of these files stand above each class, itself included.

    A base is found by its name, in the same file first. If several files have the name, the deepest counts.
    """
    bases: dict[tuple[str, str], list[str]] = {}
    for file, source in texts.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                bases[file, node.name] = names

    def depth(file: str, name: str) -> int:
        found = [0]
        for base in bases[file, name]:
            places = [file] if (file, base) in bases and base != name else [f for f, n in bases if n == base]
            found += [depth(place, base) for place in places if (place, base) != (file, name)]
        return 1 + max(found)

    return {f"{file}:{name}": depth(file, name) for file, name in bases}


def computed_names(texts: Mapping[str, str]) -> Counter[str]:
    """Count, by file, what hides which attribute is meant: setattr, vars, __dict__, and getattr of a computed name."""
    count: Counter[str] = Counter()
    for file, source in texts.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__setattr__"):
                count[file] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                computed = node.func.id == "getattr" and not isinstance(node.args[1], ast.Constant)
                if computed or node.func.id in ("setattr", "vars"):
                    count[file] += 1
    return count


def main() -> None:
    """Print today's values."""
    folders = densities(core())
    for folder, size in folders.items():
        print(f'    "{folder}": ({size.tokens_per_line:.2f}, {size.percent_long:.1f}),')
    print(f"tokens: {sum(size.tokens for size in folders.values()):,}")
    for name, depth in depths(core()).items():
        if depth > 3:
            print(f'    "{name}": {depth},')
    for file, times in computed_names(core("autograd", "nn", "parallel")).items():
        print(f'    "{file}": {times},')


if __name__ == "__main__":
    main()
