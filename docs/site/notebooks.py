"""What the site changes in a notebook and in a page of Markdown, before Sphinx reads it. Pure functions of text.

A notebook's outputs come from engines, whose client writes "[stdout:0] " before what rank 0 prints and an empty
"[output:0]" before each picture. Both shift or push away what a reader should see. Listings carry colours of their own,
for pages without a style sheet; the site has one, for light and dark. Papers, chapters and exercises become links.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[2]
PREFIX = re.compile(r"\[(?:stdout|output):\d+\] ?\n?")
LISTING = re.compile(r"# ([\w.]+)\n")
PLAIN_PARTS = re.compile(r"(```.*?```|`[^`]*`|\$[^$]*\$|\[[^\]]*\]\([^)]*\)|<a\b.*?</a>|<[^>]*>)", re.DOTALL)
PAPER = re.compile(r"\barXiv\s(\d{4}\.\d{5})")
CHAPTER = re.compile(r"\b([Cc]hapter) (\d{1,2}b?)\b(?!\.\d)")
SECTION = re.compile(r"\b([Ss]ection) (\d{1,2}b?)\.(\d{1,2})\b")
EXERCISE = re.compile(r"\b([Ee]xercise) (\d{1,2})\b")


# ---- links -----------------------------------------------------------------------------------------------------------


def chapter_of(name: str) -> str:
    """Return the number of a chapter as the text writes it, such as "6b", from its file's name; "" if it has none."""
    match = re.match(r"0?(\d+b?)_", name)
    return match[1] if match else ""


@cache
def chapters() -> dict[str, str]:
    """Return the name of each chapter's notebook, by its number."""
    return {chapter_of(path.name): path.name for path in sorted((ROOT / "chapters").glob("[0-9]*.ipynb"))}


def all_notebooks() -> list[Path]:
    """Return the chapters' notebooks, then those of chapters/more/."""
    folder = ROOT / "chapters"
    return [*sorted(folder.glob("[0-9]*.ipynb")), *sorted((folder / "more").glob("*.ipynb"))]


def page_of(path: Path) -> str:
    """Return the name of a notebook's page, such as chapters/04_data_parallel."""
    return path.relative_to(ROOT).as_posix().removesuffix(".ipynb")


@cache
def exercises() -> dict[int, str]:
    """Return the name of each exercise's file, by its number."""
    return {int(path.name[1:3]): path.name for path in sorted((ROOT / "chapters" / "exercises").glob("e[0-9]*.py"))}


@cache
def sections(chapter: str) -> dict[int, str]:
    """Return the anchor of each numbered section of a chapter, as MyST makes it from the heading."""
    found = {}
    name = chapters().get(chapter)
    if name is None:
        return found
    for cell in json.loads((ROOT / "chapters" / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for number, title in re.findall(rf"^## {chapter}\.(\d+) (.*)$", "".join(cell["source"]), re.MULTILINE):
            words = re.sub(r"[^\w\- ]", "", f"{chapter}.{number} {title}".lower())
            found[int(number)] = words.replace(" ", "-")
    return found


def with_links(text: str, folder: str, own: str = "") -> str:
    """Make links of the papers, chapters, sections and exercises that Markdown names outside of code and of links.

    `folder` leads from the page to the chapters. `own` is the page's chapter, which gets no link to itself.
    """

    def chapter(match: re.Match[str]) -> str:
        number = match[2]
        if number == own or number not in chapters():
            return match[0]
        return f"[{match[0]}]({folder}{chapters()[number]})"

    def section(match: re.Match[str]) -> str:
        number = match[2]
        anchor = sections(number).get(int(match[3]))
        if anchor is None:
            return match[0]
        page = "" if number == own else folder + chapters()[number]
        return f"[{match[0]}]({page}#{anchor})"

    def exercise(match: re.Match[str]) -> str:
        name = exercises().get(int(match[2]))
        return f"[{match[0]}]({folder}exercises/{name})" if name else match[0]

    parts = PLAIN_PARTS.split(text)
    for index in range(0, len(parts), 2):  # the odd parts are code, formulas and links
        if _is_heading_only(parts[index]):
            continue
        lines = re.split(r"(^#.*$)", parts[index], flags=re.MULTILINE)
        for place in range(0, len(lines), 2):  # the odd ones are headings
            words = PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", lines[place])
            words = _outside_links(CHAPTER, chapter, words)
            words = _outside_links(EXERCISE, exercise, words)
            lines[place] = words if PAPER.search(lines[place]) else _outside_links(SECTION, section, words)
        parts[index] = "".join(lines)
    return "".join(parts)


def _is_heading_only(text: str) -> bool:
    """Tell whether a piece of text is the rest of a heading's line."""
    return text.startswith("#") and "\n" not in text


def _outside_links(pattern: re.Pattern[str], replace, text: str) -> str:
    """Replace what the pattern finds, but not in a link that was just made."""
    pieces = re.split(r"(\[[^\]]*\]\([^)]*\))", text)
    return "".join(piece if place % 2 else pattern.sub(replace, piece) for place, piece in enumerate(pieces))


def exercise_table(text: str) -> str:
    """Make each exercise's name in a table a link to its file, and its chapter's number one to its chapter."""

    def row(match: re.Match[str]) -> str:
        words = match[2].replace("_", " ")
        chapter = chapters()[match[3]]
        return f"| [{match[1]}]({match[1]}_{match[2]}.py) {words} | [{match[3]}](../{chapter}) |"

    return re.sub(r"^\| (e\d\d)_(\w+) \| (\d+b?) \|", row, text, flags=re.MULTILINE)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def source_file(name: str) -> tuple[str, str]:
    """Return the file of an object, such as minipar.parallel.wrapper.DataParallel.loss, and its name in there."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        folder = "/".join(words[:count])
        for path in (f"{folder}.py", f"{folder}/__init__.py"):
            if (ROOT / path).is_file():
                return path, ".".join(words[count:])
    raise ValueError(f"no file of {name}")


def listing(text: str, up: str) -> str:
    """Return an object's source as HTML in the site's colours, with a link to the page of its file.

    `up` leads from the page to the site's root.
    """
    path, name = source_file(LISTING.match(text)[1])
    code = text.split("\n", 1)[1]
    lines = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
    link = f'<a href="{up}library/{path.removesuffix(".py")}.html#{name}"><code>{name}</code> in {path}</a>'
    return f'<p class="listing-file">{link}</p>\n<div class="highlight"><pre tabindex="0">{lines}</pre></div>'


def shown(output: dict, up: str) -> dict | None:
    """Return an output of a cell as the site shows it, or None for one that says nothing."""
    if output["output_type"] == "stream":
        return output | {"text": PREFIX.sub("", "".join(output["text"]))}
    data = dict(output.get("data", {}))
    text = "".join(data.get("text/plain", ""))
    if "text/html" in data and LISTING.match(text):
        return output | {"data": {"text/html": listing(text, up), "text/plain": text}}
    if set(data) == {"text/plain"}:
        text = PREFIX.sub("", text)
        return output | {"data": {"text/plain": text}} if text.strip() else None
    return output


def notebook(source: str, page: str) -> str:
    """Return the notebook (JSON) of a page, such as chapters/04_data_parallel, as the site shows it."""
    up = "../" * page.count("/")
    folder = "../" if page.startswith("chapters/more/") else ""
    content = json.loads(source)
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = with_links("".join(cell["source"]), folder, chapter_of(page.rpartition("/")[2]))
        elif cell["cell_type"] == "code":
            outputs = [shown(output, up) for output in cell["outputs"]]
            cell["outputs"] = [output for output in outputs if output is not None]
            tags = cell["metadata"].get("tags", [])
            if "setup" in tags:
                cell["metadata"]["tags"] = [*tags, "hide-input"]  # MyST-NB folds the code of cells with this tag
    return json.dumps(content)


def is_deeper(words: str) -> bool:
    """Tell whether the words below a section's heading mark it as deeper."""
    return re.fullmatch(r"Deeper\b.*\.", words) is not None


# ---- pictures --------------------------------------------------------------------------------------------------------


@cache
def purposes() -> dict[str, list[tuple[str, str]]]:
    """Return {function: [(file, first sentence of its docstring)]} of everything that a chapter may draw with."""
    found: dict[str, list[tuple[str, str]]] = {}
    files = [*ROOT.glob("visualize/*.py"), *ROOT.glob("chapters/**/*.py")]
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                sentence = ast.get_docstring(node).split("\n\n")[0].replace("\n", " ")
                found.setdefault(node.name, []).append((path.relative_to(ROOT).as_posix(), sentence))
    return found


# What the docstring of a drawing function does not say, by its name or by the picture's.
SENTENCES = {
    "draw_strategies": "the nine strategies, a row each: what each of eight devices holds, what it sends, and when",
    "plot_memory": "the memory that a rank holds, in bytes",
    "plot_step_times": "the seconds of a step, a panel for each network, beside the seconds of computation alone",
    "plot_states": "1F1B turning into ZB-H1 in three states, one below the other",
    "explore_schedules": "a pipeline schedule, each rank's actions over time, and the activations alive on each rank",
    "05_units": "the events of one unit of ZeRO stage 3, in forward and in backward",
    "11_ring_steps": "the steps of ring attention, a panel each, with keys and values on their way",
    "03_one_by_one": "the timeline of a program that waits for each collective before it computes on",
    "03_overlapped": "the timeline of a program that computes while its collectives travel",
}


def drawn_by(code: str) -> list[tuple[str, str]]:
    """Return (name of the function that draws it, name of the picture) for each picture that a cell shows, in order."""
    names = []
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE))
    assigned = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            assigned |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in sorted(calls, key=lambda call: call.lineno):
        if call.func.id == "explore_schedules":
            names.append(("explore_schedules", ""))
        if call.func.id != "show":
            continue
        drawing = call.args[0]
        if isinstance(drawing, ast.Name):
            drawing = assigned.get(drawing.id, drawing)
        function = drawing.func if isinstance(drawing, ast.Call) else drawing
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        names.append((name, call.args[1].value))
    return names


@cache
def supports(page: str) -> set[str]:
    """Return the folders of chapters/support that a page's script imports from."""
    script = (ROOT / f"{page}.py").read_text(encoding="utf-8")
    return {f"chapters/support/{name}" for name in re.findall(r"chapters\.support\.(ch\w+)", script)}


def alternative(function: str, picture: str, page: str, heading: str) -> str:
    """Return a sentence that says what a picture shows: the purpose of the function that draws it."""
    candidates = purposes().get(function, [])
    near = [sentence for path, sentence in candidates if path.rpartition("/")[0] in supports(page)]
    sentence = next(iter(near + [sentence for _, sentence in candidates]), "")
    sentence = re.sub(r"^(Draw|Plot) ", "", sentence)
    sentence = re.sub(r"[,:]? *\{[^}]*\}+[^.;]*", "", sentence)  # the form of its arguments
    sentence = re.sub(r", and (mark|count) ", r", and \1s ", sentence).rstrip(" .:;,(")
    sentence = SENTENCES.get(picture, SENTENCES.get(function, sentence))
    if not sentence:
        raise ValueError(f"picture {picture} of {page}: no docstring of {function} says what it shows")
    return f"{heading}. The picture shows {sentence}."
