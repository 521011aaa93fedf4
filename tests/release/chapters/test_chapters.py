"""Claims about the chapters: each runs under mpirun with any number of ranks, and its notebook is the same text,
executed, with its pictures, and can be executed again from nothing and saved without a change to the script.
"""

import asyncio
import inspect
import os
import re
import shutil

import pytest
from launcher import ROOT, run_mpi

from chapters.support.core_path import all_scripts
from chapters.support.show import headings

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

CHAPTERS = all_scripts()
PICTURES = {"image/png", "image/svg+xml"}

# An engine's error under %autopx is an output like any other: it does not fail the cell.
FAILURE = re.compile(r"Traceback \(most recent call last\)|AssertionError|magic function .* not found|\[\d+:execute\]")
# A cell that ends with an expression prints its value once for each engine.
VALUE = re.compile(r"Out\[\d+:\d+\]:")
# Of an engine, of the one that made the notebook, of anyone: none of them belongs into a committed file.
MACHINE = re.compile(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|dist-packages|\.venv|[A-Z]:\\Users")

chapters = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


def draws(chapter):
    return "show(" in chapter.read_text(encoding="utf-8")


def text_of(output):
    """Return all text of an output without its pictures."""
    data = {kind: value for kind, value in output.get("data", {}).items() if kind not in PICTURES}
    pieces = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", ()), *map(str, data.values())]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(pieces))


def problems(notebook, chapter):
    """List the reasons why these are not the outputs of this chapter, executed."""
    found, drawn = [], False
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed from top to bottom")
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            text = text_of(output)
            drawn = drawn or bool(PICTURES & set(output.get("data", ())))
            if output.output_type == "error" or FAILURE.search(text):
                found.append(f"cell {number} failed: {text[:2000]}")
            if VALUE.search(text):
                found.append(f"cell {number} ends with an expression, whose value every engine prints")
            if MACHINE.search(text):
                found.append(f"cell {number} names this machine: {MACHINE.search(text)[0]}")
    if not drawn and draws(chapter):
        found.append("no picture")
    return found


@chapters
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_chapter_runs_as_a_script(chapter, ranks, tmp_path):
    result = run_mpi(ranks, [str(chapter)], timeout=400, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert not draws(chapter) or list((tmp_path / "out").glob("*.png")), "it drew nothing"
    printed_lines = [text.splitlines()[1:3] for _, text in headings(chapter.read_text(encoding="utf-8"))]
    sections = [title for title, rule in printed_lines if rule.startswith("~")]
    printed = [title for title in sections if f"\n{title}\n" in result.stdout]
    assert len(printed) > len(sections) / 2 and printed == sections[: len(printed)], "sections' headings, in order"


@chapters
def test_a_notebook_is_its_script_executed(chapter):
    assert problems(jupytext.read(chapter.with_suffix(".ipynb")), chapter) == []


@chapters
def test_a_notebook_executes_from_a_clean_state(chapter, tmp_path, monkeypatch):
    """Execute the script alone in an empty directory, where nothing but the installed packages may be needed."""
    path = shutil.copy(chapter, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert problems(notebook, chapter) == []


@pytest.mark.parametrize("chapter", CHAPTERS[:2], ids=lambda path: path.stem)
@pytest.mark.parametrize("started_in", [".", "chapters"])
def test_saving_a_notebook_leaves_its_script_as_it_is(chapter, started_in, tmp_path):
    """Save a pair as JupyterLab does, with jupytext's contents manager, where versions and kernels are others."""
    (tmp_path / "chapters").mkdir()
    contents = jupytext.TextFileContentsManager()
    contents.root_dir = str(tmp_path / started_in)
    for source in (ROOT / "chapters" / "jupytext.toml", chapter, chapter.with_suffix(".ipynb")):
        shutil.copy(source, tmp_path / source.relative_to(ROOT))

    def call(method, *arguments):
        result = method(*arguments)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    path = tmp_path / "chapters" / f"{chapter.stem}.ipynb"
    name = str(path.relative_to(contents.root_dir))
    model = call(contents.get, name)
    notebook = model["content"]
    notebook.metadata.kernelspec = {"display_name": "Python 3 (mine)", "language": "python", "name": "mine"}
    notebook.metadata.language_info = {"name": "python", "version": "3.99"}
    notebook.metadata.jupytext["text_representation"] = {"format_version": "9.9", "jupytext_version": "99.9"}
    for cell in notebook.cells:
        cell.metadata |= {"editable": True, "slideshow": {"slide_type": ""}, "collapsed": True}
    call(contents.save, model, name)
    assert (tmp_path / "chapters" / chapter.name).read_bytes() == chapter.read_bytes()
    assert jupytext.read(path).metadata.kernelspec.name == "mine", "it was saved"
