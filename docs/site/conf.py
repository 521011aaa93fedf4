"""The site's Sphinx configuration. The source directory is the repository, the site is in out/site.

No chapter is executed: the notebooks are committed with their outputs. The messages of collectives are recorded anew.
Nothing is loaded from another host: MathJax is copied from its npm package, and the theme brings its fonts.
"""

import re
import sys
from pathlib import Path

# hooks.py and what it imports are beside this file; the runs that it records come from chapters/support.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

CONTENTS = """
```{toctree}
:hidden:
:caption: Chapters
:glob:

/chapters/ten_minutes
/chapters/[0-9]*
/chapters/more/*
```

```{toctree}
:hidden:
:caption: To try

/docs/site/explorers
/docs/site/editor
/docs/site/collectives
/docs/site/traces
/docs/site/gallery
/chapters/exercises/README
/chapters/pytorch/README
/docs/examples/README
/docs/examples/mistakes
```

```{toctree}
:hidden:
:caption: Reference
:glob:

/README
/docs/*
/CONTRIBUTING
/tests/README
/SECURITY
```
"""

project = "minipar"
author = "the minipar contributors"
extensions = ["myst_nb", "hooks"]
root_doc = "docs/site/start"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "tests/README.md",
    "chapters/ten_minutes.md",
    "chapters/[0-9]*.ipynb",
    "chapters/more/*.ipynb",
    "chapters/exercises/README.md",
    "chapters/pytorch/README.md",
    "docs/*.md",
    "docs/examples/*.md",
    "docs/site/*.md",
]
exclude_patterns = ["**/.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # widgets need a kernel; their cells show a picture as well
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = "minipar"
html_theme_options = {
    "use_download_button": False,  # it would offer a PDF alone
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search; a second one above it is too much
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is; without it the theme logs an error
html_static_path = ["static", "../../out/mathjax"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("every_page.js", {"defer": "defer"})]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sourcelink = False
# The parts of MathJax that the chapters' formulas need: a third less than its ready-made combinations.
mathjax_path = "es5/startup.js"
mathjax3_config = {
    "loader": {"load": ["core", "input/tex-base", "[tex]/ams", "output/chtml", "a11y/assistive-mml"]},
    "tex": {"packages": {"[+]": ["ams"]}},
}

# The scripts of pages and their modules, each of which imports from earlier ones alone.
SCRIPTS = {
    "explorers": ("memory", "models", "actions", "schedules", "traffic", "layouts", "draw", "forms", "page", "board"),
    "every_page": ("pause", "folded"),
    "start": ("actions", "draw", "map"),
    "editor_page": (
        *("actions", "schedules", "csv", "in_order", "check", "path", "edits", "grade"),
        *("draw", "forms", "chips", "editor"),
    ),
    "player_page": ("actions", "draw", "player"),
    "traces": (
        *("actions", "draw", "forms"),
        *("trace", "trace_colours", "trace_rows", "trace_words", "trace_moves", "trace_page"),
    ),
}


def join_modules(folder, names):
    """Join modules into one script. Browsers import no module from a file, only over HTTP."""
    modules = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in names]
    program = re.sub(r"^import .*\n|^export ", "", "".join(modules), flags=re.MULTILINE)
    return '"use strict";\n{\n' + program + "}\n"


def add_contents(app, docname, source):
    """Add the table of contents to the first page, which has none in the repository."""
    if docname == app.config.root_doc:
        source[0] += CONTENTS


def write_scripts(app, exception):
    """Write the scripts of the pages that have one."""
    if exception is not None:
        return
    for name, modules in SCRIPTS.items():
        script = join_modules(Path(app.confdir) / "static", modules)
        Path(app.outdir, "_static", f"{name}.js").write_text(script, encoding="utf-8")


def setup(app):
    """Connect the two functions above."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_scripts)
