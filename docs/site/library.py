"""Pages of the repository's files: what is linked in chapters and docs opens as a page and is not downloaded.

A page has an anchor for each function and class. A file of minipar.parallel says which of its lines a chapter shows.
"""

import ast
import html
import json
import re
from functools import cache
from pathlib import Path

from notebooks import LISTING, ROOT, chapter_of, source_file
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

FOLDER = "library"
SOURCES = (".py", ".js", ".mjs", ".toml", ".txt", ".yml")


def page_name(path: str) -> str:
    """Return the name of the page of a file, as Sphinx names pages."""
    return f"{FOLDER}/{path.removesuffix('.py')}"


def objects(path: Path) -> dict[str, tuple[int, int]]:
    """Return {name: (first line, last line)} of a Python file's functions, classes and methods."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            found[prefix + child.name] = (first, child.end_lineno)
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


@cache
def shown_in_chapters() -> dict[str, dict[str, list[str]]]:
    """Return {file: {object: chapters}} of what the chapters' listings show."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted((ROOT / "chapters").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        for output in outputs:
            data = output.get("data", {})
            match = LISTING.match("".join(data.get("text/plain", ""))) if "text/html" in data else None
            if match:
                file, name = source_file(match[1])
                found.setdefault(file, {}).setdefault(name, []).append(path.stem)
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
    """Return a file's page: its path, the chapters that show parts of it, and its lines with their numbers."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = highlight(text, get_lexer_for_filename(file), HtmlFormatter(nowrap=True)).splitlines()
    spans = objects(ROOT / file) if file.endswith(".py") else {}
    anchors: dict[int, list[str]] = {}
    for name, (first, _) in spans.items():
        anchors.setdefault(first, []).append(name)
    numbered = []
    blank = len(text) - len(text.lstrip("\n"))  # Pygments leaves out the first empty lines
    for number, line in enumerate(lines, 1 + blank):
        marks = "".join(f'<span id="{html.escape(name)}"></span>' for name in anchors.get(number, []))
        numbered.append(f'{marks}<span class="line-number">{number:4d}</span>  {line}')
    return (
        f"<h1>{html.escape(file).replace('/', '/<wbr>')}</h1>\n{_chapters_of(file)}"  # it may be cut after a slash
        f'<div class="highlight library"><pre tabindex="0">' + "\n".join(numbered) + "</pre></div>"
    )


def _chapters_of(file: str) -> str:
    """Return a paragraph of links to the chapters that show a part of a file."""
    up = "../" * page_name(file).count("/")
    links = [
        f'<a href="{up}chapters/{chapter}.html">{chapter_of(chapter)}</a> ({html.escape(name)})'
        for name, chapters in shown_in_chapters().get(file, {}).items()
        for chapter in dict.fromkeys(chapters)
    ]
    return f"<p>Shown in chapter {', '.join(links)}.</p>\n" if links else ""


def report() -> str:
    """Return the page of all library files: how many lines of code each of parallel/ has that no chapter shows."""
    rows = []
    for path in sorted((ROOT / "minipar").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        code = code_lines(file)
        unseen = len(code - lines_shown(file))
        seen = f"{len(code) - unseen} of {len(code)}"
        link = f'<a href="{page_name(file).removeprefix(FOLDER + "/")}.html"><code>{file}</code></a>'
        rows.append(f"<tr><td>{link}</td><td>{html.escape(_purpose(path))}</td><td>{seen}</td></tr>")
    return (
        "<h1>The library's files</h1>\n<p>Every file of the package, as a page. The last column counts the lines of "
        "code that some chapter shows as a listing; the others are not needed to follow the course.</p>\n"
        '<div class="pst-scrollable-table-container"><table class="table"><thead><tr><th>file</th><th>what it is</th>'
        "<th>lines shown</th></tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _purpose(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.:])\s", text.replace("\n", " "))[0].rstrip(":")
