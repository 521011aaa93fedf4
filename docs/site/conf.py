"""The site's Sphinx configuration. The source directory is the repository, the site is in out/site.

Nothing is executed: the notebooks are committed with their outputs. Nothing is loaded from another host: MathJax is
copied from its npm package, and the theme brings its fonts.
"""

from pathlib import Path

CONTENTS = """
```{toctree}
:hidden:
:caption: Chapters
:glob:

chapters/[0-9]*
```

```{toctree}
:hidden:
:caption: To try

docs/site/explorers
docs/site/gallery
chapters/exercises/README
```

```{toctree}
:hidden:
:caption: Reference
:glob:

docs/*
```
"""

project = "minipar"
extensions = ["myst_nb"]
root_doc = "README"
include_patterns = ["README.md", "chapters/[0-9]*.ipynb", "chapters/exercises/README.md", "docs/*.md", "docs/site/*.md"]
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
html_theme_options = {"use_download_button": True, "show_toc_level": 2, "home_page_in_toc": True}
html_static_path = ["static", "../../out/mathjax"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sourcelink = False
mathjax_path = "es5/tex-mml-chtml.js"


def setup(app):
    """Add the table of contents to README, which has none in the repository."""

    def add_contents(app, docname, source):
        if docname == root_doc:
            source[0] += CONTENTS

    app.connect("source-read", add_contents)
    Path(app.outdir).mkdir(parents=True, exist_ok=True)
