"""The quick chapters run as scripts on two ranks, and each notebook has its script's cells; release/ runs them all."""

import re

import pytest
from launcher import ROOT, run_mpi

from chapters.support import core_path, fold

CHAPTERS, SCRIPTS = core_path.scripts(), core_path.all_scripts()
QUICK = [path for path in CHAPTERS if path.stem.split("_")[0] in "00 01 03 06 06b 11".split()]  # others take longer


@pytest.mark.parametrize("chapter", QUICK, ids=lambda path: path.stem)
def test_a_chapter_runs_as_a_script(chapter, tmp_path):
    result = run_mpi(2, [str(chapter)], timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]


def cells(notebook):
    """List the kind and text of each cell, with its tags and what is folded."""
    known = ("tags", "jupyter", fold.COLLAPSED)
    return [(cell.cell_type, cell.source, {key: cell.metadata.get(key) for key in known}) for cell in notebook.cells]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(script):
    jupytext = pytest.importorskip("jupytext")
    notebook, expected = jupytext.read(script.with_suffix(".ipynb")), jupytext.read(script)
    fold.fold(expected)
    assert cells(notebook) == cells(expected), "make notebooks"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_core_is_short_and_needs_no_deeper_section(script):
    assert core_path.faults(script) == []


def test_pages_state_the_minutes_and_words_of_the_core():
    pages = [page.read_text(encoding="utf-8") for page in core_path.PAGES]
    assert all("core of [chapter 0]" in page and "core of chapters 3 to 9" in page for page in pages)
    assert core_path.table() in pages[0], "python -m chapters.support.core_path"
    assert [core_path.renewed(page) for page in pages] == pages, "python -m chapters.support.core_path"
    limit = int(re.search(r"at most ([\d,]+) words", pages[0])[1].replace(",", ""))
    path = [chapter for chapter in CHAPTERS if chapter.name[:2] not in ("11", "12", "13")]
    assert sum(core_path.sizes(chapter)[2] for chapter in path) <= limit


def test_every_script_has_a_notebook():
    notebooks = {path for folder in (".", "more") for path in (ROOT / "chapters" / folder).glob("*.ipynb")}
    assert notebooks == {script.with_suffix(".ipynb") for script in SCRIPTS}


def test_chapter_0_walks_through_one_file():
    """Its cells with this tag are the lines of one_file.py, all and in order; its last section alone needs minipar."""
    chapter = CHAPTERS[0].read_text(encoding="utf-8")
    one_file = (ROOT / "chapters" / "one_file.py").read_text(encoding="utf-8")
    cells = re.findall(r'^# %%[^\n]*"one-file"[^\n]*\n(.*?)(?=^# %%)', chapter, re.MULTILINE | re.DOTALL)
    assert [cell for cell in cells if cell.strip() not in one_file] == []
    program = one_file[one_file.index("import ") :].splitlines()
    assert [line for cell in cells for line in cell.splitlines() if line and line[0] != "#"] == [
        line for line in program if line and line[0] != "#"
    ]
    alone, library = chapter.split("# ## 0.13 ")
    assert "import minipar" in library and not re.search(r"^(import|from) minipar", alone, re.MULTILINE)
