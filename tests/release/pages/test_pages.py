"""Claims about what the site makes of the repository's files: outputs, links, alternative texts, files as pages, runs.

They need no Sphinx; `make site` builds the pages of these.
"""

import json
import re
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[3] / "docs" / "site"
sys.path.insert(0, str(SITE))

import api  # noqa: E402
import collectives  # noqa: E402
import differences  # noqa: E402
import library  # noqa: E402
import notebooks  # noqa: E402

CHAPTERS = notebooks.all_notebooks()


def cells(path):
    return json.loads(notebooks.notebook(path.read_text(encoding="utf-8"), notebooks.page_of(path)))["cells"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_pages_show_no_mark_of_an_engine(path):
    assert notebooks.PREFIX.search(path.read_text(encoding="utf-8"))
    outputs = [output for cell in cells(path) for output in cell.get("outputs", [])]
    assert outputs and not any(notebooks.PREFIX.search(json.dumps(output)) for output in outputs)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_each_picture_of_a_chapter_has_a_sentence(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        pictures = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        if not pictures:
            continue
        drawn = notebooks.drawn_by("".join(cell["source"]))
        assert len(drawn) == len(pictures)
        for function, name in drawn:
            sentence = notebooks.alternative(function, name, notebooks.page_of(path), "A section")
            assert len(sentence.split()) > 6 and sentence.endswith(".")


def test_papers_chapters_sections_and_exercises_are_links():
    text = "(Li, arXiv 2006.15704, section 3.2; chapter 5). `chapter 5`, exercise 8.\n## 3.2 chapter 5\nSection 6b.3"
    linked = notebooks.with_links(text, "", own="3")
    assert "[arXiv 2006.15704](https://arxiv.org/abs/2006.15704), section 3.2" in linked
    assert "[chapter 5](05_zero.ipynb)" in linked and "`chapter 5`" in linked and "## 3.2 chapter 5" in linked
    assert "[exercise 8](exercises/e08_column_row_layers.py)" in linked and "ipynb#6b3-the-proof)" in linked
    assert notebooks.with_links("section 5.1", "") == f"[section 5.1](05_zero.ipynb#{notebooks.sections('5')[1]})"
    kept = '<a href="x.html">Read\nchapter 0</a> [chapter 5](x.md)'
    assert notebooks.with_links(kept, "", own="3") == kept
    assert notebooks.with_links("chapter 3, chapter 99", "", own="3") == "chapter 3, chapter 99"
    assert [notebooks.chapter_of(name) for name in ("00_in", "06b_x", "10_x", "muon")] == ["0", "6b", "10", ""]


def test_the_table_of_exercises_has_links():
    table = (notebooks.ROOT / "chapters" / "exercises" / "README.md").read_text(encoding="utf-8")
    linked = notebooks.exercise_table(table)
    for name in notebooks.exercises().values():
        assert linked.count(f"]({name})") == 1
    assert "| [e10](e10_one_f_one_b.py) one f one b | [7](../07_pipeline.ipynb) | 1F1B as lists |" in linked


def test_listings_lead_to_the_object_in_its_file():
    shown = library.shown_in_chapters()
    assert len(shown) > 20
    for file, names in shown.items():
        assert set(names) <= set(library.objects(notebooks.ROOT / file)), file
    assert library.lines_shown("minipar/parallel/ddp.py") < set(range(1, 400))


def test_a_file_has_its_functions_and_one_link_to_each_chapter():
    for file in library.shown_in_chapters():
        page, names = library.body(file), library.objects(notebooks.ROOT / file)
        public = {name for name in names if "_" not in {part[0] for part in name.split(".")}}
        assert all(page.count(f'<a href="#{name}">') == 1 for name in public), file
        links = re.findall(r'href="[./]*chapters/([^"]+)"', page)
        assert links and len(links) == len(set(links)), file


def test_a_public_name_has_a_page_with_its_call_and_its_source():
    bodies = {name: api.body(name) for name in api.names()}
    for name, body in bodies.items():
        file, own = api.place(name)
        assert f'library/{file.removesuffix(".py")}.html#{own}"' in body and f'"{name}.html"' in api.index()
    assert "AdamW(parameters: Iterable[Parameter], lr: float=0.001" in bodies["AdamW"]
    assert "no_sync(" in bodies["fully_shard"] and sum("Shown in" in body for body in bodies.values()) > 3


def test_setup_and_deeper_sections_are_folded():
    setup = {"cell_type": "code", "source": "", "outputs": [], "metadata": {"tags": ["setup"]}}
    (cell,) = json.loads(notebooks.notebook(json.dumps({"cells": [setup]}), "chapters/more/x"))["cells"]
    assert cell["metadata"]["tags"] == ["setup", "hide-input"]
    assert notebooks.is_deeper("Deeper, 4 minutes.") and not notebooks.is_deeper("Core, 4 minutes.")


def test_each_step_of_the_ladder_is_a_section():
    page = differences.page()
    assert [f'id="{before}-{after}"' in page for before, after, _ in differences.PAIRS] == [True] * 10


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_recorded_collectives_end_as_they_should(ranks):
    everything = [[2**ranks - 1] * ranks] * ranks
    assert collectives.sum_run(ranks, collectives.all_reduce("ring"))["states"][-1] == everything
    scattered = collectives.sum_run(ranks, collectives.reduce_scatter)["states"][-1]
    assert [row[rank] for rank, row in enumerate(scattered)] == everything[0]
    from_each = [[1 << slot for slot in range(ranks)]] * ranks
    assert collectives.exchange_run(ranks)["states"][-1] == from_each
    assert collectives.attention_run(ranks)["states"][-1] == from_each
    gathered = collectives.gather_run(ranks)["states"]
    assert gathered[-2] == from_each and gathered[-1] == gathered[0]


@pytest.mark.parametrize("program", [collectives.hierarchical, *map(collectives.all_reduce, collectives.NAMED)])
def test_recorded_sums_on_eight_ranks_are_whole(program):
    assert collectives.sum_run(8, program)["states"][-1] == [[255] * 8] * 8
