"""Claims about README.md, CONTRIBUTING.md, docs/ and the short course: links, paths and programs are true."""

import ast
import importlib
import json
import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import minipar

ROOT = Path(__file__).parents[1]
COURSE = "chapters/ten_minutes.md"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", COURSE]
DOCUMENTS += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = {"README.md": 100, "docs/museum.md": 122}  # a row there quotes `compare`, which names two parameters
FOLDERS = ("chapters", "docs", "examples", "minipar", "tests", "visualize")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(document):
    """Targets of a document's links and pictures that are inside the project, such as "docs/speed.md#pipelines"."""
    targets = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"|^\[[^]]+\]: (\S+)$", document, re.MULTILINE)
    return [target for pair in targets for target in pair if target and not target.startswith("https://")]


def anchors(file):
    """Return the anchors of the headings in Markdown or in a notebook, as GitHub and the site make them."""
    document = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        document = "\n".join("".join(cell["source"]) for cell in json.loads(document)["cells"])
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", document, re.MULTILINE)}


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name):
    missing = []
    for target in links(text(name)):
        path, _, place = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (place and place not in anchors(file)):
            missing.append(target)
    used = re.findall(r"\| \[([\d.]+)\] \|$", text(name), re.MULTILINE)
    assert missing == [] and {f"\n[{number}]: " for number in used} <= set(re.findall(r"\n\[[\d.]+\]: ", text(name)))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_the_text_exist(name):
    paths = re.findall(rf"\b((?:{'|'.join(FOLDERS)})/[\w/.-]*\w)", re.sub(r"\]\([^)]*\)", "]", text(name)))
    assert [path for path in paths if "NN" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_lines_are_short(name):
    limit = COLUMNS.get(name, 120)
    assert [line for line in text(name).splitlines() if len(line) > limit] == []


def sections(document, level):
    """Each heading of a level with the lines below it, without blank ones."""
    parts = re.split(rf"^{'#' * level} (.*)$", document, flags=re.MULTILINE)
    bodies = [re.split(rf"^#{{1,{level}}} ", body, flags=re.MULTILINE)[0].splitlines() for body in parts[2::2]]
    return {head: [line for line in body if line] for head, body in zip(parts[1::2], bodies, strict=True)}


def test_readme_links_every_document():
    assert {name for name in DOCUMENTS if name != "README.md"} <= set(links(text("README.md")))


def test_the_short_course_is_short_and_each_step_names_a_section():
    steps = sections(text(COURSE), 2)
    assert len(text(COURSE).split()) <= 1000 and len(steps) == 7
    assert [head for head, lines in steps.items() if ".ipynb#" not in "\n".join(lines)] == []


def test_a_hundred_questions_name_their_sections():
    entries = re.findall(r"^- \*\*.*(?:\n  .*)*", text("docs/index.md"), re.MULTILINE)
    assert all(entry.endswith(("]", ")")) for entry in entries)  # the second kind has a link to a document
    names = [entry.rsplit(" [", 1)[1].removesuffix("]") for entry in entries if entry.endswith("]")]
    targets = dict(re.findall(r"^\[(.+)\]: (.+)$", text("docs/index.md"), re.MULTILINE))
    assert len(names) >= 100 and set(names) == set(targets)
    for name, target in targets.items():
        section, _, title = name.partition(", ")
        assert target.startswith(f"../chapters/{section.split('.')[0].zfill(2 + ('b' in section))}_"), name
        assert target.partition("#")[2].startswith(anchor(title or f"{section} ")), name


def test_the_way_of_a_gradient_names_functions_that_exist():
    rows = re.findall(r"^ +\d+  (\w+/\w+\.py) +([\w.]+)", text("docs/architecture.md"), re.MULTILINE)
    assert len(rows) == 16
    for file, name in rows:
        where = importlib.import_module(f"minipar.{file.removesuffix('.py').replace('/', '.')}")
        assert callable(attrgetter(name)(where)), (file, name)


def test_eight_seams_and_each_later_file_says_which_it_uses():
    rows = [line for line in sections(text("docs/architecture.md"), 2)["Seams"] if line.startswith("| ")]
    assert len(rows) - 2 == 8  # without the head and the rule
    for path in (ROOT / "minipar" / "more").rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert path.name == "__init__.py" or "Seams of the core: " in docstring, path


def test_readmes_reading_paths_lead_through_files_that_exist():
    rows = re.findall(r"\]\((minipar/[\w/]+\.py)\) \| ([^|]*)\|", text("README.md"))
    later = [(Path(path).parent, name) for path, names in rows for name in re.findall(r"`(\w+\.py)`", names)]
    assert later and [name for folder, name in later if not (ROOT / folder / name).exists()] == []


def test_every_row_of_reliability_is_a_test_or_a_target():
    rows = [line.split("|")[2].strip() for line in text("docs/reliability.md").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("test", "---"))]
    makefiles = [path.read_text(encoding="utf-8") for path in [ROOT / "Makefile", *ROOT.glob("*/*/Makefile")]]
    assert rows
    for row in rows:
        if row.startswith("`make "):
            target = row[6:-1].split()[-1]
            assert any(f"\n{target}:" in makefile for makefile in makefiles), row
            continue
        name, _, words = row.partition(": ")
        files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"test_{name}.py")]
        assert any(words.lower() in file.lower() for file in files), row


# ---- README's programs -----------------------------------------------------------------------------------------------


def programs():
    """The blocks of Python in README: the first is a whole program, the second a module."""
    return re.findall(r"```python\n(.*?)```", text("README.md"), re.DOTALL)


def printed_losses(threads, monkeypatch, capsys, changes=()):
    """The losses that README's program, with some of its text replaced, prints on so many ranks."""
    launch, program = minipar.launch, programs()[0]
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    with monkeypatch.context() as patch:
        patch.setattr(minipar, "launch", lambda main: launch(main, threads=threads))
        exec(compile(program, "README.md", "exec"), {})
    return [float(line.removeprefix("loss ")) for line in capsys.readouterr().out.splitlines()]


def test_readme_program_learns_on_any_number_of_ranks(monkeypatch, capsys):
    alone, together = (printed_losses(threads, monkeypatch, capsys) for threads in (1, 2))
    assert len(alone) == 20 and alone[-1] < 0.6 * alone[0]
    assert together == pytest.approx(alone, abs=2e-4)


EXACT = [("n_head=4))", 'n_head=4), dtype="float64")'), (":.4f", ":.15g"), ("steps=20", "steps=5")]


def test_readme_program_shows_equality_in_float64(monkeypatch, capsys):
    assert 'mp.GPT(config, dtype="float64")' in text("README.md")
    alone, together = [printed_losses(threads, monkeypatch, capsys, EXACT) for threads in (1, 2)]
    assert together == pytest.approx(alone, rel=1e-12)


def test_readme_schedule_is_the_optimizers_lr(monkeypatch, capsys):
    """With a rate of 0 from the second step on, the batch that comes again has the same loss."""
    same_batch = ("default_rng(step)", "default_rng(0)")
    stop = ("optimizer.zero_grad()", "optimizer.zero_grad(); optimizer.lr = 0.0")
    losses = printed_losses(2, monkeypatch, capsys, [*EXACT, same_batch, stop])
    assert "set `optimizer.lr = ...` before each step" in text("README.md")
    assert losses[1] != losses[0] and losses[1:] == losses[1:2] * 4


def test_readme_targets_of_minus_100_do_not_count(monkeypatch, capsys):
    """Half of the targets, marked or left out: the mean is that of the others."""
    assert "Targets of -100 do not count" in text("README.md")
    whole = "yield tokens[:, :-1], tokens[:, 1:]"
    marked = (whole, "y = tokens[:, 1:].copy(); y[:, 32:] = -100; yield tokens[:, :-1], y")
    short = (whole, "yield tokens[:, :32], tokens[:, 1:33]")
    losses = [printed_losses(2, monkeypatch, capsys, [*EXACT, change]) for change in (marked, short)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_readme_module_trains_under_every_stage(stage):
    names = {"mp": minipar}
    exec(compile(programs()[1], "README.md", "exec"), names)
    inputs = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
    targets = inputs.sum(axis=1, keepdims=True)

    def losses(threads):
        values = []

        def main(world):
            model = names["MLP"]()
            wrapper = minipar.shard(model, world, stage) if stage else minipar.DistributedDataParallel(model, world)
            optimizer = minipar.AdamW(wrapper.parameters(), lr=1e-2)
            for _ in range(20):
                loss = wrapper.loss(inputs[world.rank :: world.size], targets[world.rank :: world.size])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0:
                    values.append(loss.item())

        minipar.launch(main, threads=threads)
        return values

    alone = losses(1)
    assert alone[-1] < alone[0] / 2
    assert losses(2) == pytest.approx(alone, rel=1e-4)


def test_readme_a_gathered_model_is_written_and_loaded(tmp_path):
    assert '`mp.save_pretrained(model, "out", state)`' in text("README.md")
    config = minipar.GPTConfig(vocab_size=11, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    before = minipar.GPT(config).state_dict()

    def main(world):
        model = minipar.GPT(config)
        wrapper = minipar.fully_shard(model, world)
        state = minipar.gather_state(model, wrapper.parameters(), world)
        if world.rank == 0:
            minipar.save_pretrained(model, tmp_path, state)

    minipar.launch(main, threads=3)
    after = minipar.load_pretrained(tmp_path).state_dict()
    assert after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
