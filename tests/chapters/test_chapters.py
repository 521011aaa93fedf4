"""The quick chapters run as scripts on two ranks, and each notebook has its script's cells; release/ runs them all."""

import re

import pytest
from launcher import ROOT, run_mpi

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.py"))
QUICK = [path for path in CHAPTERS if path.stem.split("_")[0] in "00 01 03 06 06b 11".split()]  # others take longer


@pytest.mark.parametrize("chapter", QUICK, ids=lambda path: path.stem)
def test_a_chapter_runs_as_a_script(chapter, tmp_path):
    result = run_mpi(2, [str(chapter)], timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]


def cells(notebook):
    """List the kind, text and tags of each cell."""
    return [(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))) for cell in notebook.cells]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(chapter):
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.read(chapter.with_suffix(".ipynb"))
    assert cells(notebook) == cells(jupytext.read(chapter)), f"make notebooks CHAPTER={chapter.name.split('_')[0]}"


def test_every_script_has_a_notebook():
    assert {path.stem for path in (ROOT / "chapters").glob("*.ipynb")} == {chapter.stem for chapter in CHAPTERS}


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
