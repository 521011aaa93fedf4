"""Fold what a reader may pass over: `python -m chapters.support.fold FILE...`, which `make notebooks` runs twice.

JupyterLab folds all cells below a heading's cell whose metadata say so, up to the next heading of the same or a higher
level. What else is in the heading's cell stays visible. So in a script each heading begins a cell, and the line that
marks a section as deeper ends it. In a notebook these sections are folded, and the code of cells with some tags.
"""

import re
import sys
from pathlib import Path
from typing import Any

COLLAPSED = "jp-MarkdownHeadingCollapsed"  # jupytext leaves it out of a script
DEEPER = re.compile(r"##.*\n\n\*Deeper\b.*\*$")  # the whole text of a cell
TAGS = {"setup", "hide-input"}  # of cells whose code is folded
MARKDOWN = "# %% [markdown]\n"


def with_headings_alone(script: str) -> str:
    """Return a script in which each heading begins a cell, and a line such as "*Deeper, 4 minutes.*" ends it."""
    cells = re.split(r"^(?=# %%)", script, flags=re.MULTILINE)
    return "".join(_split(cell) if cell.startswith(MARKDOWN) else cell for cell in cells)


def _split(cell: str) -> str:
    cell = re.sub(r"\n(#\n)+(?=# #+ )", f"\n\n{MARKDOWN}", cell)
    return re.sub(r"(# ##.*\n#\n# \*Deeper\b.*\*\n)(#\n)+", rf"\1\n{MARKDOWN}", cell)


def metadata(cell: Any) -> dict[str, Any]:
    """Return the metadata that a notebook's cell needs so that what a reader may pass over is folded."""
    if cell.cell_type == "markdown" and DEEPER.match(cell.source):
        return {COLLAPSED: True}
    if cell.cell_type == "code" and TAGS & set(cell.metadata.get("tags", ())):
        return {"jupyter": {"source_hidden": True}}
    return {}


def fold(notebook: Any) -> None:
    """Fold a notebook's deeper sections and the code of its cells with some tags, and nothing else."""
    for cell in notebook.cells:
        for key in (COLLAPSED, "jupyter"):
            cell.metadata.pop(key, None)
        cell.metadata.update(metadata(cell))


def main(paths: list[str]) -> None:
    """Split the headings of scripts, and fold notebooks."""
    import nbformat  # only notebooks need it

    for path in paths:
        if path.endswith(".py"):
            script = Path(path).read_text(encoding="utf-8")
            Path(path).write_text(with_headings_alone(script), encoding="utf-8")
        else:
            notebook = nbformat.read(path, as_version=4)
            fold(notebook)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
