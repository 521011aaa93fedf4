"""Output of the chapters: a script prints its headings as it reaches them, a notebook does not."""

import os
import subprocess
import sys

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
How many p are
there?

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


@pytest.mark.parametrize("chapter", sorted((ROOT / "chapters").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_a_chapter_has_one_title_with_a_question_then_sections(chapter):
    texts = [text for _, text in show.headings(chapter.read_text())]
    titles = [text for text in texts if "\n==" in text]
    assert titles == texts[:1] and titles[0].endswith("?") and len(texts) > 5
