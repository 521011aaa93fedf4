"""The quick chapters run as scripts on two ranks, and each notebook has its script's cells; release/ runs them all."""

import re

import pytest
from launcher import ROOT, run_mpi

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.py"))
QUICK = [path for path in CHAPTERS if path.name[:2] in ("00", "01", "03", "06", "11")]  # the others take longer


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
    assert cells(notebook) == cells(jupytext.read(chapter)), f"make notebooks CHAPTER={int(chapter.name[:2])}"


def test_every_script_has_a_notebook():
    assert {path.stem for path in (ROOT / "chapters").glob("*.ipynb")} == {chapter.stem for chapter in CHAPTERS}


def test_chapter_0_is_one_file_that_needs_no_library():
    """It imports nothing of minipar before its last section, which compares it with the library."""
    alone, library = CHAPTERS[0].read_text(encoding="utf-8").split("# ## 0.10 ")
    modules = set(re.findall(r"^(?:import|from) (\w+)", alone, re.MULTILINE))
    assert modules == {"math", "mpi4py", "numpy", "os"} and "import minipar" in library
