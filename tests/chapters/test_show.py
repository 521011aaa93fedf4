"""Output of the chapters: a script prints its headings as it reaches them, a notebook does not."""

import inspect
import os
import re
import subprocess
import sys
from html import unescape

import pytest
from launcher import ROOT

from chapters.support import show

SCRIPT = """# %% [markdown]
# # 9. A title
#
# **How many $p$ are
# there?**
#
# Prose that is not printed.

# %% tags=["active-ipynb"]
# # a comment of code

# %%
from chapters.support.show import printer, show_source

say, silent = printer(0), printer(1)


def later():
    say("two", end="!\\n")


# %% [markdown]
# ## 9.1 Without output
#
# ### Some `code`

# %%
say("one")
silent("never")
later()

# %% [markdown]
# ## 9.2 A source

# %%
for _ in range(2):
    show_source(later)

# %% [markdown]
# ### For you
"""

PRINTED = """
9. A title
==========
How many p are there?

9.1 Without output
~~~~~~~~~~~~~~~~~~

Some code
.........
one
two!

9.2 A source
~~~~~~~~~~~~
"""


def test_a_script_prints_its_headings_where_it_reaches_them(tmp_path):
    (tmp_path / "99.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "99.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    source = f'{show.RULE}\n# __main__.later\ndef later():\n    say("two", end="!\\n")\n{show.RULE}\n'
    assert done.stdout == PRINTED + 2 * source


def test_a_notebook_prints_no_headings(monkeypatch, capsys):
    monkeypatch.setattr(show, "in_notebook", lambda: True)
    show.printer(0)("text")
    show.print_headings()
    assert capsys.readouterr().out == "text\n"


def long_lines():
    """A function with < and &, and a line of 120 columns."""
    return [value for value in range(1000) if value < 500 and value & 1 and value % 3 and value % 5 and value % 7 > 1]


def test_a_notebook_shows_a_source_as_html_and_as_text(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append((data, raw)))
    show.show_source(long_lines)
    ((data, raw),) = shown
    source = inspect.getsource(long_lines).rstrip()
    assert raw and data["text/plain"] == f"# {__name__}.long_lines\n{source}"
    assert unescape(re.sub("<[^>]*>", "", data["text/html"])).rstrip("\n") == data["text/plain"], "no line is changed"
    assert "class=" not in data["text/html"], "it needs no style sheet"


def test_nbconvert_keeps_the_font_and_the_lines_of_a_source():
    """In the page the element keeps its own style, against the rules of the page for any `pre`."""
    nbformat, nbconvert = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert")
    source = inspect.getsource(long_lines)
    output = nbformat.v4.new_output("display_data", {"text/html": show.source_html(source), "text/plain": source})
    cell = nbformat.v4.new_code_cell("show_source(long_lines)", outputs=[output])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    (block,) = re.findall(r'<pre style="([^"]*)">(.*?)</pre>', page, flags=re.DOTALL)
    style = dict(rule.strip().split(": ") for rule in block[0].split(";"))
    assert style["font-family"] == "monospace" and style["white-space"] == "pre" and style["overflow-x"] == "auto"
    assert style["word-break"] == style["overflow-wrap"] == "normal"
    assert unescape(re.sub("<[^>]*>", "", block[1])) == source
    rules = [rule for rule in page.replace("}", "{").split("{") if "white-space" in rule and "!important" in rule]
    assert not any("pre-wrap !important" in rule for rule in rules), "no rule of the page is stronger"


@pytest.mark.parametrize("chapter", sorted((ROOT / "chapters").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_a_chapter_has_one_title_with_a_question_then_sections(chapter):
    texts = [text for _, text in show.headings(chapter.read_text())]
    titles = [text for text in texts if "\n==" in text]
    assert titles == texts[:1] and titles[0].endswith("?") and len(texts) > 5
