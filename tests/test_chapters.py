"""Claims about the chapters: each runs under mpirun with any number of ranks, and its notebook is the same text,
executed, with its pictures, and can be executed again from nothing and saved without a change to the script.
"""

import ast
import asyncio
import copy
import inspect
import os
import re
import shutil

import pytest
from launcher import ROOT, run_mpi

from chapters.support.show import headings

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.py"))
PICTURES = ("image/png", "image/svg+xml")
EXPECTED = {
    "00_in_one_file",
    "01_autograd",
    "02_gpt",
    "03_collectives",
    "04_data_parallel",
    "05_zero",
    "06_tensor_parallel",
    "07_pipeline",
    "08_beyond_1f1b",
    "09_3d_parallel",
    "10_planning",
    "11_long_sequences",
    "12_experts",
    "13_precision",
    "14_my_run_is_wrong",
}

STANDALONE = {"00_in_one_file"}  # it uses NumPy and mpi4py only: no pictures drawn, and headings that it prints itself

# An engine's error under %autopx is an output like any other: it does not fail the cell.
FAILURE = re.compile(r"Traceback \(most recent call last\)|AssertionError|magic function .* not found|\[\d+:execute\]")
# A cell that ends with an expression prints its value once for each engine.
VALUE = re.compile(r"Out\[\d+:\d+\]:")
# Of an engine, of the one that made the notebook, of anyone: none of them belongs into a committed file.
MACHINE = re.compile(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|dist-packages|\.venv|[A-Z]:\\Users")


def str_of(value):
    """Return a test's id: a chapter's name, or a number of ranks."""
    return str(getattr(value, "stem", value))


chapters = pytest.mark.parametrize("chapter", CHAPTERS, ids=str_of)


@pytest.fixture(scope="module")
def jupytext():
    """The package. Its import takes seconds, which only these tests spend."""
    return pytest.importorskip("jupytext")


def v4():
    """Return nbformat's module for notebooks of version 4. Its import takes seconds, which only these tests spend."""
    return pytest.importorskip("nbformat.v4")


def notebook_of(path):
    return v4().reads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))


def cells(notebook):
    """List the kind, text and tags of each cell."""
    return [(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))) for cell in notebook.cells]


def outputs(notebook):
    """Yield (number of the cell, output) for each output of the notebook."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            yield number, output


def text_of(output):
    """Return all text of an output without its pictures."""
    data = {kind: value for kind, value in output.get("data", {}).items() if kind not in PICTURES}
    pieces = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", ()), *map(str, data.values())]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(pieces))


def errors(notebook):
    """List the errors in a notebook, on the client or on an engine."""
    found = []
    for number, output in outputs(notebook):
        wrong = FAILURE.search(text_of(output))
        if output.output_type == "error" or wrong:
            found.append(f"cell {number}: {output.get('ename', '')} {text_of(output)[:2000]}")
    return found


def problems(notebook, script, draws=True):
    """List the reasons why this notebook does not belong to this script. `draws`: it has pictures."""
    found = errors(notebook)
    if cells(notebook) != cells(script):
        found.append("the notebook is out of step with its script: make notebooks")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"not executed from top to bottom: {counts}")
    if draws and not any(set(PICTURES) & set(output.get("data", ())) for _, output in outputs(notebook)):
        found.append("no picture")
    for number, output in outputs(notebook):
        if VALUE.search(text_of(output)):
            found.append(f"cell {number}: it ends with an expression, whose value every engine prints")
        machine = MACHINE.search(text_of(output))
        if machine:
            found.append(f"cell {number}: its output names this machine: {machine[0]}")
    return found


def test_the_chapters_are_found():
    assert {chapter.stem for chapter in CHAPTERS} >= EXPECTED
    assert {path.stem for path in (ROOT / "chapters").glob("*.ipynb")} == {chapter.stem for chapter in CHAPTERS}


# `make test` runs chapters 0 and 1 on three ranks. `make long` runs the rest, which take up to two minutes each,
# and all notebooks.
RUNS = [(chapter, ranks) for chapter in CHAPTERS for ranks in (1, 2, 3, 5, 8)]
SHORT = {("00_in_one_file", 3), ("01_autograd", 3)}


PRINTING = {"print", "say", "reveal", "show", "show_source"}


def prints(statement):
    """Return whether a statement of a chapter prints when it runs, and with it the headings above it."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {function.id for function in calls if isinstance(function, ast.Name)}
    return not isinstance(statement, ast.FunctionDef) and not names.isdisjoint(PRINTING)


@pytest.mark.parametrize(
    ("chapter", "ranks"),
    [pytest.param(c, n, marks=[] if (c.stem, n) in SHORT else pytest.mark.long) for c, n in RUNS],
    ids=str_of,
)
def test_chapter_runs_as_a_script(chapter, ranks, tmp_path):
    result = run_mpi(ranks, [str(chapter)], timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert chapter.stem in STANDALONE or list((tmp_path / "out").glob("*.png")), "it drew nothing"
    script = chapter.read_text()
    last = max(statement.lineno for statement in ast.parse(script).body if prints(statement))
    titles = [text for line, text in headings(script) if line < last]
    if chapter.stem in STANDALONE:
        titles = [text.split("\n")[1] for text in titles]  # without underline and question
    end = 0
    for text in titles:  # "In the library" is the title of many
        assert f"{text}\n" in result.stdout[end:], f"each section's heading, in order; not found: {text}"
        end = result.stdout.index(f"{text}\n", end) + len(text)


@chapters
def test_notebook_is_the_script_executed(chapter, jupytext):
    assert problems(notebook_of(chapter), jupytext.read(chapter), chapter.stem not in STANDALONE) == []


@pytest.mark.long
@chapters
def test_notebook_executes_from_a_clean_state(chapter, tmp_path, monkeypatch, jupytext):
    """Execute the script alone in an empty directory, where nothing but the installed packages may be needed."""
    nbclient = pytest.importorskip("nbclient")
    path = shutil.copy(chapter, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert problems(notebook, jupytext.read(path), chapter.stem not in STANDALONE) == []


@chapters
@pytest.mark.parametrize("started_in", [".", "chapters"])
def test_saving_a_notebook_leaves_its_script_as_it_is(chapter, started_in, tmp_path, jupytext):
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
    assert notebook_of(path).metadata.kernelspec.name == "mine", "it was saved"


def test_chapter_0_is_one_file_that_needs_no_library():
    """It imports nothing of minipar before its last section, which compares it with the library."""
    script = CHAPTERS[0].read_text()
    alone, library = script.split("# ## 0.10 ")
    modules = set(re.findall(r"^(?:import|from) (\w+)", alone, re.MULTILINE))
    assert modules == {"math", "mpi4py", "numpy", "os"} and "import minipar" in library


def code_lines(script):
    """Count the lines of code of a chapter: neither blank, nor comment, nor markdown."""
    lines, code = 0, True
    for line in map(str.strip, script.splitlines()):
        if line.startswith("# %%"):
            code = "[markdown]" not in line
        lines += bool(line) and code and not line.startswith("#")
    return lines


def without_deeper(script):
    """The script without the sections that are marked as deeper, which one reads another time."""
    sections = re.split(r"(?m)^(?=# ## )", script)
    return "".join(section for section in sections if "\n#\n# *Deeper" not in section)


def is_plain(value):
    """Return whether a value of an assignment is a name, an attribute of one, or a constant: it computes nothing."""
    if isinstance(value, ast.Attribute):
        return is_plain(value.value)
    if isinstance(value, ast.UnaryOp):
        return is_plain(value.operand)
    return isinstance(value, ast.Name | ast.Constant)


def parallel_assignments(script):
    """List the lines that compute several values and assign them in one statement. An exchange, `a, b = b, a`, may."""
    found = []
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            values = node.value.elts
            if isinstance(target, ast.Tuple) and not all(map(is_plain, values)):
                names = {ast.unparse(each) for each in target.elts}
                if names != {ast.unparse(each) for each in values}:
                    found.append(ast.unparse(node))
    return found


@chapters
def test_one_statement_says_one_thing(chapter):
    assert parallel_assignments(chapter.read_text()) == []


def test_a_parallel_assignment_is_seen():
    assert parallel_assignments("a, b = f(x), []") == ["a, b = (f(x), [])"]
    single = ("a, b = f(x)", "x[0], x[1] = x[1], x[0]", "r, p = comm.rank, comm.size", "B, T = 2, -16")
    assert [each for each in single if parallel_assignments(each)] == []


@chapters
def test_a_chapter_is_one_sitting(chapter):
    assert code_lines("# %%\nx = 1\n\n# a comment\n\n# %% [markdown]\n# Text\n") == 1
    script = chapter.read_text()
    # What stands in the library for the other chapters is in the first one itself.
    assert code_lines(without_deeper(script)) <= (450 if chapter.stem in STANDALONE else 300)
    assert code_lines(script) <= 450 and len(script.splitlines()) <= 1125


# ---- the checks notice what they are for -----------------------------------------------------------------------------


@pytest.fixture
def good(jupytext):
    """A small script and its executed notebook, without fault."""
    script = jupytext.reads("# %% [markdown]\n# Why?\n\n# %%\nprint(1)\n\n# %%\nshow()\n", fmt="py:percent")
    notebook = copy.deepcopy(script)
    first, second = (cell for cell in notebook.cells if cell.cell_type == "code")
    first.execution_count, second.execution_count = 1, 2
    first.outputs = [v4().new_output("stream", name="stdout", text="[stdout:0] 1\n")]
    second.outputs = [v4().new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Picture>"})]
    assert problems(notebook, script) == []
    return notebook, script


def stream(text):
    return v4().new_output("stream", name="stdout", text=text)


def fail(name):
    return v4().new_output("error", ename=name, evalue="on the client", traceback=[])


SPOILED = [
    ("out of step", lambda code: code[0].update(source="print(2)")),
    ("out of step", lambda code: code[0].metadata.update(tags=["active-ipynb"])),
    ("not executed", lambda code: code[1].update(execution_count=None)),
    ("not executed from top to bottom", lambda code: code[1].update(execution_count=7)),
    ("no picture", lambda code: code[1].update(outputs=[])),
    ("names this machine", lambda code: code[0].outputs.append(stream("/" + "home/me/x.py:3: Warning"))),
    ("ends with an expression", lambda code: code[0].outputs.append(stream("Out[3:7]: 'text'"))),
    ("Traceback", lambda code: code[0].outputs.append(stream("Traceback (most recent call last)\n"))),
    ("AssertionError", lambda code: code[0].outputs.append(stream("[3:execute]\n\x1b[31mAssertionError\x1b[0m: no"))),
    ("ZeroDivisionError", lambda code: code[0].outputs.append(fail("ZeroDivisionError"))),
]


@pytest.mark.parametrize(("claim", "spoil"), SPOILED)
def test_a_spoiled_notebook_is_seen(good, claim, spoil):
    notebook, script = good
    spoil([cell for cell in notebook.cells if cell.cell_type == "code"])
    (problem,) = problems(notebook, script)
    assert claim in problem


def test_a_failing_chapter_is_seen(tmp_path):
    script = tmp_path / "99_broken.py"
    script.write_text(
        "from minipar.comm import world\ncomm = world()\nassert comm.rank != 1, 'caught'\ncomm.barrier()\n"
    )
    result = run_mpi(2, [str(script)], timeout=60, cwd=tmp_path)
    assert result.returncode != 0 and "caught" in result.stderr
