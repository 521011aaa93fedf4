"""Pages of the public names of minipar: what each is, how it is called, its source, and the chapters that show it."""

import html
import re
from inspect import cleandoc, isclass
from inspect import signature as inherited

import library
from notebooks import ROOT, source_file

import minipar

FOLDER = "api"


def names() -> list[str]:
    """Return the public names."""
    return sorted(minipar.__all__)


def page_name(name: str) -> str:
    """Return the name of a page, as Sphinx names pages."""
    return f"{FOLDER}/{name}"


def place(name: str) -> tuple[str, str]:
    """Return the file that defines a public name, and the name in there."""
    value = getattr(minipar, name)
    return source_file(f"{value.__module__}.{value.__qualname__}")


def call(name: str) -> str:
    """Return how a public name is called. The constructor of a class may be another class's, or a data class's."""
    file, own = place(name)
    value = getattr(minipar, name)
    if isclass(value) and issubclass(value, Exception):
        return own
    if isclass(value) and f"{own}.__init__" not in library.definitions(ROOT / file):
        return own + re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", str(inherited(value))).replace(" -> None", "")
    return library.signature(ROOT / file, own)


def body(name: str) -> str:
    """Return the page of a public name."""
    file, own = place(name)
    value = getattr(minipar, name)
    path = ROOT / file
    source = f"../{library.page_name(file)}.html"
    methods = [other for other in library.definitions(path) if other.startswith(f"{own}.")]
    classes = [each for each in getattr(value, "__mro__", ()) if each.__module__.startswith("minipar")]
    tables = []
    for each in classes:
        defined, inside = source_file(f"{each.__module__}.{each.__qualname__}")
        target = f"../{library.page_name(defined)}.html"
        tables.append(library.table_of(ROOT / defined, f"{inside}.", target))
    return (
        f"<h1>minipar.<wbr>{name}</h1>\n<p><code>{html.escape(call(name))}</code></p>\n"
        f"{paragraphs(value.__doc__)}"
        f'<p>Its source: <a href="{source}#{own}">{file}</a>.</p>\n'
        f"{library.shown_in(file, [own, *methods], page_name(name))}"
        f"{''.join(tables)}"
    )


def paragraphs(docstring: str) -> str:
    """Return a docstring's paragraphs as HTML; an indented one keeps its lines."""
    found = []
    for part in re.split(r"\n\n+", html.escape(cleandoc(docstring), quote=False)):
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", part)
        found.append(f"<pre>{part}</pre>" if part.startswith(" ") else f"<p>{words}</p>")
    return "\n".join(found) + "\n"


def index() -> str:
    """Return the page that lists all public names."""
    rows = []
    for name in names():
        file, own = place(name)
        purpose = library.first_sentence(library.definitions(ROOT / file)[own])
        rows.append(f'<tr><td><a href="{name}.html"><code>{name}</code></a></td><td>{html.escape(purpose)}</td></tr>')
    return (
        "<h1>The names of minipar</h1>\n<p>After <code>import minipar as mp</code> each is <code>mp.NAME</code>.</p>\n"
        '<div class="pst-scrollable-table-container"><table class="table"><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )
