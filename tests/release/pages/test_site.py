"""Claims about the site's sources, without building it: contents and configuration.

`make site` builds it with warnings as errors, and `make site-check` opens every page in a browser.
"""

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SITE = ROOT / "docs" / "site"
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "chapters/ten_minutes.md",
    ROOT / "tests/README.md",
    *ROOT.glob("chapters/[0-9]*.ipynb"),
    *ROOT.glob("chapters/more/*.ipynb"),
    *ROOT.glob("chapters/exercises/*.md"),
    *ROOT.glob("chapters/pytorch/*.md"),
]
NAMES = sorted(str(path.relative_to(ROOT)) for path in PAGES)


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("conf", SITE / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(conf):
    """The entries of the table of contents, some with wildcards."""
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", conf.CONTENTS, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("/") for line in lines if line and not line.startswith(":")]


def in_folder(name, pattern):
    """Whether a name matches a pattern whose stars do not match a slash, as Sphinx reads it."""
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_built_and_in_the_contents(conf, name):
    page = name.rsplit(".", 1)[0]
    assert any(in_folder(name, pattern) for pattern in conf.include_patterns)
    assert page == conf.root_doc or any(fnmatch(page, entry) for entry in contents(conf))


def test_the_contents_name_pages_that_exist(conf):
    pages = [name.rsplit(".", 1)[0] for name in NAMES]
    assert [entry for entry in contents(conf) if not any(fnmatch(page, entry) for page in pages)] == []


def test_the_gallery_shows_every_picture():
    gallery = (SITE / "gallery.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\]\(\.\./\.\./visualize/gallery/([^)]+)\)", gallery))
    assert shown == {path.name for path in (ROOT / "visualize" / "gallery").iterdir()}


def test_each_script_has_its_modules_in_order(conf):
    modules = {path.stem for path in (SITE / "static").glob("*.js")}
    assert {name for names in conf.SCRIPTS.values() for name in names} == modules
    for names in conf.SCRIPTS.values():
        for position, name in enumerate(names):
            source = (SITE / "static" / f"{name}.js").read_text(encoding="utf-8")
            imported = re.findall(r'^import .* from "\./(\w+)\.js";$', source, re.MULTILINE)
            assert len(imported) == len(re.findall(r"^import\b", source, re.MULTILINE))
            assert set(imported) <= set(names[:position])
        program = conf.join_modules(SITE / "static", names)
        assert not re.search(r"^(import|export)\b", program, re.MULTILINE)
        declared = re.findall(r"^(?:const|let|function|async function) (\w+)", program, re.MULTILINE)
        assert len(declared) == len(set(declared))


def test_files_of_javascript_are_short():
    for path in [*SITE.rglob("*.js"), *SITE.rglob("*.mjs"), *SITE.rglob("*.css")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 400 and max(map(len, lines)) <= 120, path
