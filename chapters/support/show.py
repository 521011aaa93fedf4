"""Output of the chapters: inline in a notebook; from a script text on the terminal and pictures under out/.

A script also prints its title, its question, and the heading and first sentence of each section, before the first
output of that section.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = Path("out")
WIDTH = 100  # columns
RULE = "-" * WIDTH
SOURCE_STYLE = (
    "white-space: pre; overflow-x: auto; overflow-wrap: normal; word-break: normal; font-family: monospace; "
    "font-size: 13px; line-height: 1.35; color: #222222; background: #F8F8F8; padding: 6px; margin: 0"
)
UNDERLINES = {"#": "=", "##": "~", "###": "."}  # for each level of heading


def in_notebook() -> bool:
    """Tell whether this is a Jupyter kernel or an ipyparallel engine, and not a script or plain Python."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None


def printer(rank: int) -> Callable[..., None]:
    """Return the function with which a rank of a chapter prints: only rank 0 does, a script below its headings."""

    def print_below_headings(*words: object, **options: Any) -> None:
        print_headings()
        text = str(options.pop("sep", " ")).join(map(str, words))
        print("\n".join(map(wrapped, text.split("\n"))), **options)

    if rank > 0:
        return lambda *words, **options: None
    return print if in_notebook() else print_below_headings


def wrapped(line: str) -> str:
    """Wrap a sentence that is longer than a terminal's line; a line with columns stays as it is."""
    if len(line) <= WIDTH or "  " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, WIDTH, initial_indent="", subsequent_indent=indent + "  ", break_long_words=False)


def show(figure: Any, name: str) -> None:
    """Display a figure in a notebook; from a script write out/`name`.png and print its path."""
    if in_notebook():
        from IPython.display import display

        display(figure)
        return
    from visualize.style import save  # imports matplotlib, which only the rank that draws needs

    path = OUT / f"{name}.png"
    save(figure, str(path))
    print_headings()
    print(f"picture: {path}")


def show_source(*objects: Callable[..., Any] | type) -> None:
    """Print the source text of functions or classes from the package, so that a chapter copies no code."""
    print_headings()
    for thing in objects:
        source = inspect.getsource(thing).rstrip()
        text = f"# {thing.__module__}.{thing.__qualname__}\n{source}"
        if in_notebook():
            _display_source(text)
        else:
            print(f"{RULE}\n{text}\n{RULE}")


def show_file(path: str) -> None:
    """Show the text of a file of the project in a notebook; a script prints its path alone."""
    print_headings()
    if in_notebook():
        _display_source(f"# {path}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}")
    else:
        print(f"file: {path}")


def _display_source(text: str) -> None:
    from IPython.display import display

    display({"text/html": source_html(text), "text/plain": text}, raw=True)


def source_html(text: str) -> str:
    """Return Python's text as HTML that needs no style sheet: coloured, in a fixed-width font, no line broken.

    A line that is wider than the page scrolls. Jupyter's and nbconvert's style sheets break the lines of any `pre` at
    the window's edge, so its own style says otherwise. GitHub removes all styles: there it is a plain `pre`.
    """
    from pygments import highlight  # comes with IPython
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lines = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True, noclasses=True))
    return f'<pre style="{SOURCE_STYLE}">{lines}</pre>'


_printed: dict[str, int] = {}  # the line up to which each script's headings are printed


def print_headings() -> None:
    """Print the headings that the running script has passed since the last call; in a notebook nothing."""
    frame = sys._getframe()
    while frame and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or in_notebook():
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    for number, text in headings(Path(file).read_text(encoding="utf-8")):
        if _printed.get(file, 0) < number < line:
            print(text)
    _printed[file] = max(line, _printed.get(file, 0))


def headings(script: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the printed form of each heading in a script's markdown cells, the title with its question."""
    lines = script.splitlines()
    markdown = False
    for number, line in enumerate(lines, start=1):
        if line.startswith("# %%"):
            markdown = "[markdown]" in line
        heading = re.match("# (#{1,3}) (.*)", line)
        if markdown and heading:
            text = _plain(heading[2])
            words = [_question(lines[number:])] if heading[1] == "#" else [_first_sentence(lines[number:])]
            yield number, "\n".join(["", text, UNDERLINES[heading[1]] * len(text), *filter(None, words)])


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Yield the paragraphs of markdown cells, each on one line, up to the next heading or the next cell of code."""
    words: list[str] = []
    for line in lines:
        if line in ("", "#", "# %% [markdown]"):
            yield _plain(" ".join(words))
            words = []
        elif line.startswith(("# %%", "# #")) or not line.startswith("#"):
            break
        else:
            words.append(line.removeprefix("# "))
    yield _plain(" ".join(words))


def _question(lines: list[str]) -> str:
    """Return a chapter's question: its first paragraph."""
    return textwrap.fill(next(filter(None, _paragraphs(lines)), ""), WIDTH)


def _first_sentence(lines: list[str]) -> str:
    """Return the first sentence of a section, without the line that says how long it takes, wrapped.

    An exercise, a list, a table and a picture are passed over. A lead, such as "**The norm.**", belongs to the sentence
    after it.
    """
    for paragraph in _paragraphs(lines):
        if re.match(r"(Core|Deeper|Predict|Prediction|Exercise)\b|[|!<\d-]", paragraph) or not paragraph:
            continue
        sentences = re.split(r"(?<=[\w)\]%][.?]) (?=[A-Za-z(])", paragraph)
        count = 2 if len(sentences[0].split()) < 3 else 1
        sentence = " ".join(sentences[:count])
        if sentence[-1] not in ".?:)":  # a formula comes next
            sentence += " ..."
        return textwrap.fill(sentence, WIDTH)
    return ""


# What TeX's commands print. Those that are not here print their names: alpha.
TEX = {
    "cdot": "*",
    "dots": "...",
    "ge": ">=",
    "langle": "<",
    "le": "<=",
    "pm": "+-",
    "rangle": ">",
    "times": "x",
    "to": "->",
    "top": "T",
}


def _plain(text: str) -> str:
    """Remove Markdown's and TeX's marks. Of a link the text stays."""

    def of_tex(found: re.Match[str]) -> str:
        name = found[2] or ""
        return found[1] or TEX.get(name, name)

    without_links = re.sub(r"(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", text)
    without_marks = re.sub(r"[`$*]", "", without_links)
    without_tex = re.sub(r"\\(?:text|mathrm)\{([^}]*)\}|\\([A-Za-z]+)|\\,", of_tex, without_marks)
    return without_tex.replace("{", "(").replace("}", ")")
