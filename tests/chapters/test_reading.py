"""Claims about reading the chapters: pictures come often, every section is marked, and the core path is short."""

import pytest
from launcher import ROOT
from reading import core_words, sections, stretches

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "chapters").glob("[0-9]*.ipynb"))}
WHEN_NEEDED = {"11", "12", "13"}  # these chapters are no part of the core path
MOST_WORDS = 25_000
LONGEST_STRETCH = 150


def v4():
    """Return nbformat's module for notebooks of version 4. Its import takes seconds, which only these tests spend."""
    from nbformat import v4

    return v4


def read(name):
    return v4().reads(NOTEBOOKS[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_150_lines_without_a_picture(name):
    assert max(stretches(read(name))) < LONGEST_STRETCH


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_every_section_is_core_or_deeper(name):
    assert [section.title for section in sections(read(name)) if section.mark is None] == []


def test_the_core_path_has_at_most_25000_words():
    words = {name: core_words(read(name)) for name in NOTEBOOKS if name[:2] not in WHEN_NEEDED}
    assert sum(words.values()) <= MOST_WORDS, words


def test_the_readme_says_what_the_core_path_is():
    text = " ".join((ROOT / "chapters" / "README.md").read_text(encoding="utf-8").split())
    assert f"chapters 0 to 10 and 14: at most {MOST_WORDS:,} words" in text


# ---- the counts see what they are for --------------------------------------------------------------------------------


def markdown(text):
    return v4().new_markdown_cell(text)


def code(*outputs):
    return v4().new_code_cell("x = 1\n" * 200, outputs=list(outputs))


def stream(lines):
    return v4().new_output("stream", name="stdout", text="a line\n\n" * lines)


def data(kind):
    return v4().new_output("display_data", data={kind: "aGk=", "text/plain": "a\n" * 200})


def notebook(*cells):
    return v4().new_notebook(cells=list(cells))


def test_text_and_outputs_count_up_to_a_picture():
    picture = code(data("image/png"))
    assert stretches(notebook(markdown("one\n\ntwo"), code(stream(148)), picture, markdown("three"))) == [150, 1]


def test_code_and_listings_do_not_count():
    assert stretches(notebook(markdown("one"), code(data("text/html")))) == [1]


def test_a_file_in_markdown_is_a_picture():
    assert stretches(notebook(markdown("one\n\n![a ring](ring.gif)\n\ntwo\nthree"))) == [1, 2]


def test_a_section_has_the_mark_of_the_one_around_it():
    texts = (
        "# 1. A title\n\nthree more words",
        "## 1.1 A section\n\n*Core, 3 minutes.*\n\nText.",
        "### Below it\n\nText.\n\n### Aside\n\n*Deeper, 1 minute.*",
        "### After it\n\nText.\n\n## 1.2 Without a mark\n\nText.\n\n### Below it",
    )
    small = notebook(*map(markdown, texts))
    marks = [section.mark for section in sections(small)]
    assert marks == ["Core", "Core", "Core", "Deeper", "Core", None, None]
    assert core_words(small) == 7 + 8 + 4 + 4
