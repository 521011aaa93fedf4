"""The quick chapters run as scripts on two ranks, and each notebook has its script's cells; release/ runs them all."""

import re

import pytest
from launcher import ROOT, run_mpi

from chapters.support import core_path, fold

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.py"))
SCRIPTS = [*CHAPTERS, *sorted((ROOT / "chapters" / "more").glob("[a-z]*.py"))]
QUICK = [path for path in CHAPTERS if path.name[:2] in ("00", "01", "03", "06", "11")]  # the others take longer


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
def test_headings_are_alone_so_that_deeper_sections_fold(script):
    text = script.read_text(encoding="utf-8")
    assert fold.with_headings_alone(text) == text, f"python -m chapters.support.fold {script.relative_to(ROOT)}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_core_needs_no_deeper_cell_and_no_cell_is_long(script):
    assert core_path.faults(script) == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_the_core_of_a_chapter_is_neither_short_nor_long(chapter):
    fewest = 1800 if "03" <= chapter.name[:2] <= "10" else 0
    assert fewest <= core_path.sizes(chapter)[2] <= 2800


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
