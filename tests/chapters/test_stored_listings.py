"""The listings that notebooks have kept are today's code."""

import inspect
import json
import pkgutil
import re

import pytest
from launcher import ROOT

from chapters.support import show

LISTING = re.compile(r"# ((?:minipar|chapters)\.[\w.]+)\n")


def stored_listings(chapter):
    """Yield the name, the text and the HTML of each listing that a notebook has kept."""
    for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(data.get("text/plain", ""))
            html = "".join(data.get("text/html", ""))
            named = LISTING.match(text)
            if html and named is not None:
                yield named[1], text, html


@pytest.mark.parametrize("chapter", sorted((ROOT / "chapters").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_todays_code(chapter):
    """A listing is printed when the notebook is executed, and the code may change afterwards."""
    for name, text, html in stored_listings(chapter):
        source = inspect.getsource(pkgutil.resolve_name(name)).rstrip()
        assert text == f"# {name}\n{source}", f"execute the notebook again, or store this listing: {name}"
        assert html == show.source_html(text)


def test_notebooks_have_listings():
    counts = [len(list(stored_listings(chapter))) for chapter in (ROOT / "chapters").glob("*.ipynb")]
    assert sum(counts) > 60
