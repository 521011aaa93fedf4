"""How a chapter shows things: in a notebook inline, from a script as files under out/ and text on the terminal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visualize.style import Picture, save

OUT = Path("out")
RULE = "-" * 100


def in_notebook() -> bool:
    """True in a Jupyter kernel and in an ipyparallel engine, False in a script and in plain Python."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None


def show(figure: Picture, name: str) -> None:
    """Display `figure` in a notebook; from a script write out/`name`.png and print its path."""
    if in_notebook():
        from IPython.display import display

        display(figure)
        return
    path = OUT / f"{name}.png"
    save(figure, str(path))
    print(f"picture: {path}")


def show_source(*objects: Callable[..., Any] | type) -> None:
    """Print the source text of functions or classes as it stands in the package: a chapter copies no code."""
    for thing in objects:
        source = inspect.getsource(thing).rstrip()
        place = f"{thing.__module__}.{thing.__qualname__}"
        if in_notebook():
            from IPython.display import Code, display

            display(Code(f"# {place}\n{source}", language="python"))
        else:
            print(f"{RULE}\n# {place}\n{source}\n{RULE}")
