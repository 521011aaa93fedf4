"""Pages of the repository's files: what is linked in chapters and docs opens as a page and is not downloaded.

A page says which chapters show a part of its file, and lists the functions and classes, each of which has an anchor.
"""

import ast
import html
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from notebooks import LISTING, ROOT, all_notebooks, chapter_of, page_of, source_file
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

FOLDER = "library"
SOURCES = (".py", ".js", ".mjs", ".toml", ".txt", ".yml")


def page_name(path: str) -> str:
    """Return the name of the page of a file, as Sphinx names pages."""
    return f"{FOLDER}/{path.removesuffix('.py')}"


@cache
def definitions(path: Path) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the definitions of a Python file's functions, classes and methods by their names."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = child
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def objects(path: Path) -> dict[str, tuple[int, int]]:
    """Return {name: (first line, last line)} of a Python file's functions, classes and methods."""
    return {
        name: (min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno)
        for name, node in definitions(path).items()
    }


def signature(path: Path, name: str) -> str:
    """Return how a function, class or method is called: its name with the arguments, and what it returns."""
    node = definitions(path)[name]
    if isinstance(node, ast.ClassDef):
        constructor = definitions(path).get(f"{name}.__init__")
        return f"{name}({_arguments(constructor, bound=True)})" if constructor else name
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({_arguments(node, bound='.' in name)}){returned}"


def _arguments(node: ast.FunctionDef, bound: bool) -> str:
    """Write a function's arguments; those of a method without its object."""
    arguments = ast.unparse(node.args)
    return re.sub(r"^(self|cls)(, (/, )?|$)", "", arguments) if bound else arguments


def first_sentence(node: ast.AST) -> str:
    """Return the first sentence of a docstring."""
    text = ast.get_docstring(node) or ""
    return re.split(r"(?<=[.:])\s", text.replace("\n", " "))[0].rstrip(":")


def table_of(path: Path, within: str = "", target: str = "") -> str:
    """Return the table of a file's public functions, classes and methods; of one class's methods with `within`.

    `target` is the page that has the anchors.
    """
    rows = [
        f'<tr><td><a href="{target}#{name}"><code>{html.escape(signature(path, name))}</code></a></td>'
        f"<td>{html.escape(first_sentence(node))}</td></tr>"
        for name, node in definitions(path).items()
        if name.startswith(within) and not any(part.startswith("_") for part in name.split("."))
    ]
    return (
        '<div class="pst-scrollable-table-container"><table class="table signatures"><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>\n"
        if rows
        else ""
    )


@cache
def shown_in_chapters() -> dict[str, dict[str, list[str]]]:
    """Return {file: {object: chapters}} of what the listings of the chapters show; by their pages."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in all_notebooks():
        page = page_of(path)
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        for output in outputs:
            data = output.get("data", {})
            match = LISTING.match("".join(data.get("text/plain", ""))) if "text/html" in data else None
            if match:
                file, name = source_file(match[1])
                found.setdefault(file, {}).setdefault(name, []).append(page)
    return found


def lines_shown(file: str) -> set[int]:
    """Return the numbers of a file's lines that some chapter's listing shows."""
    spans = objects(ROOT / file)
    shown: set[int] = set()
    for name in shown_in_chapters().get(file, {}):
        first, last = spans[name]
        shown |= set(range(first, last + 1))
    return shown


def code_lines(file: str) -> set[int]:
    """Return the numbers of a file's lines that hold code: no blank lines, comments or docstrings."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def body(file: str) -> str:
    """Return a file's page: its path, the chapters that show parts of it, its functions, and its lines with numbers."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = highlight(text, get_lexer_for_filename(file), HtmlFormatter(nowrap=True)).splitlines()
    spans = objects(ROOT / file) if file.endswith(".py") else {}
    anchors: dict[int, list[str]] = {}
    for name, (first, _) in spans.items():
        anchors.setdefault(first, []).append(name)
    numbered = []
    blank = len(text) - len(text.lstrip("\n"))  # Pygments leaves out the first empty lines
    for at, line in enumerate(lines, 1 + blank):
        marks = "".join(f'<span id="{html.escape(name)}"></span>' for name in anchors.get(at, []))
        numbered.append(f'{marks}<span class="line-number">{at:4d}</span>  {line}')
    return (
        f"<h1>{html.escape(file).replace('/', '/<wbr>')}</h1>\n"  # it may be cut after a slash
        f"{shown_in(file, spans, page_name(file))}{table_of(ROOT / file) if spans else ''}"
        f'<div class="highlight library"><pre tabindex="0">' + "\n".join(numbered) + "</pre></div>"
    )


def shown_in(file: str, names: Iterable[str], page: str) -> str:
    """Return a paragraph for a page: one link to each chapter that shows some of these objects of a file."""
    objects_of: dict[str, list[str]] = {}
    for name, chapters in shown_in_chapters().get(file, {}).items():
        for chapter in dict.fromkeys(chapters):
            if name in names:
                objects_of.setdefault(chapter, []).append(name)
    links = [
        f'<a href="{"../" * page.count("/")}{chapter}.html">{_title(chapter)}</a> ({", ".join(shown)})'
        for chapter, shown in sorted(objects_of.items())
    ]
    return f"<p>Shown in {', '.join(links)}.</p>\n" if links else ""


def _title(chapter: str) -> str:
    name = chapter.rpartition("/")[2]
    return f"chapter {chapter_of(name)}" if chapter_of(name) else name.replace("_", " ")


def report() -> str:
    """Return the page of all library files: how many lines of code each of parallel/ has that no chapter shows."""
    rows = []
    for path in sorted((ROOT / "minipar").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        code = code_lines(file)
        unseen = len(code - lines_shown(file))
        seen = f"{len(code) - unseen} of {len(code)}"
        link = f'<a href="{page_name(file).removeprefix(FOLDER + "/")}.html"><code>{file}</code></a>'
        purpose = first_sentence(ast.parse(path.read_text(encoding="utf-8")))
        rows.append(f"<tr><td>{link}</td><td>{html.escape(purpose)}</td><td>{seen}</td></tr>")
    return (
        "<h1>The library's files</h1>\n<p>Every file of the package, as a page. The last column counts the lines of "
        "code that some chapter shows as a listing; the others are not needed to follow the course.</p>\n"
        '<div class="pst-scrollable-table-container"><table class="table"><thead><tr><th>file</th><th>what it is</th>'
        "<th>lines shown</th></tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )
