"""The Sphinx extension of the site: what is changed between the repository's files and the pages."""

import html
from pathlib import Path

import api
import collectives
import differences
import library
import notebooks
import slim
import traces
from docutils import nodes

SIDE_BY_SIDE = """
<p>Side by side: <a href="differences.html">what changes from one strategy to the next</a>.</p>
"""


def read_source(app, docname, source):
    """Mend notebooks, and link what pages name."""
    if Path(app.env.doc2path(docname)).suffix == ".ipynb":
        source[0] = notebooks.notebook(source[0], docname)
    elif docname == "chapters/exercises/README":
        source[0] = notebooks.exercise_table(source[0])
    elif docname == "docs/museum":
        source[0] = source[0].replace("| yes ", "| ✓ ").replace("`yes`", "✓")
    elif docname == "docs/examples/README":
        source[0] = source[0].replace("# Examples\n", f"# Examples\n{SIDE_BY_SIDE}", 1)
    elif docname.startswith("docs/"):
        source[0] = notebooks.with_links(source[0], "../" * docname.count("/") + "chapters/")


def read_document(app, document):
    """Describe the pictures of a notebook, and lead links of files to their pages."""
    docname = app.env.docname
    for node in list(document.findall(lambda node: node.tagname == "download_reference")):
        file = (Path(app.env.doc2path(docname)).parent / node["reftarget"]).resolve()
        if file.suffix not in library.SOURCES or not file.is_relative_to(notebooks.ROOT):
            continue
        path = file.relative_to(notebooks.ROOT).as_posix()
        app.env.library_files = {*getattr(app.env, "library_files", set()), path}
        link = nodes.reference(refuri="../" * docname.count("/") + library.page_name(path) + ".html", internal=True)
        link += node.children
        node.replace_self(link)
    if Path(app.env.doc2path(docname)).suffix == ".ipynb":
        describe_pictures(document, docname)
        for section in list(document.findall(nodes.section)):
            fold(section)


def fold(section):
    """Put what is below the heading of a deeper section into an element that opens.

    The heading stays outside, so that a link to the section leads to something that is seen; static/folded.js opens it.
    """
    mark = section.children[1] if len(section.children) > 1 else None
    if isinstance(mark, nodes.paragraph) and notebooks.is_deeper(mark.astext()):
        words = html.escape(mark.astext().rstrip("."))
        section.remove(mark)
        section.insert(1, nodes.raw("", f'<details class="deeper"><summary>{words}</summary>', format="html"))
        section.append(nodes.raw("", "</details>", format="html"))


def describe_pictures(document, page):
    """Give each picture that a chapter's cell shows a sentence as its alternative text."""
    for cell in document.findall(lambda node: node.get("nb_element") == "cell_code" if is_element(node) else False):
        code = "".join(part.astext() for part in cell.children if part.get("nb_element") == "cell_code_source")
        pictures = list(cell.findall(nodes.image))
        if not pictures:
            continue
        section = cell.parent
        while not isinstance(section, nodes.section):
            section = section.parent
        heading = section.next_node(nodes.title).astext()
        for picture, (function, name) in zip(pictures, notebooks.drawn_by(code), strict=True):
            picture["alt"] = notebooks.alternative(function, name, page, heading)


def is_element(node):
    """Tell whether a node of a document has attributes."""
    return isinstance(node, nodes.Element)


def add_library(app):
    """Yield a page for each file of the library and each other file that a page links."""
    files = {path.relative_to(notebooks.ROOT).as_posix() for path in (notebooks.ROOT / "minipar").rglob("*.py")}
    for file in sorted(files | getattr(app.env, "library_files", set())):
        yield library.page_name(file), {"title": file, "body": library.body(file)}, "page.html"
    title = "From one strategy to the next"
    yield "docs/examples/differences", {"title": title, "body": differences.page()}, "page.html"
    for name in api.names():
        yield api.page_name(name), {"title": f"minipar.{name}", "body": api.body(name)}, "page.html"
    yield api.page_name("index"), {"title": "The names of minipar", "body": api.index()}, "page.html"
    yield f"{library.FOLDER}/index", {"title": "The library's files", "body": library.report()}, "page.html"


def describe_page(app, pagename, templatename, context, doctree):
    """Describe a page to search engines and previews by its first paragraph."""
    paragraph = doctree.next_node(nodes.paragraph) if doctree is not None else None
    words = " ".join(paragraph.astext().split()) if paragraph is not None else context.get("title", "")
    text = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    title = context.get("title", "").replace('"', "&quot;")
    metatags = context.get("metatags", "")
    context["metatags"] = (
        f'{metatags}<meta name="description" content="{text[:300]}">\n'
        f'<meta property="og:title" content="{title}">\n'
        f'<meta property="og:description" content="{text[:300]}">\n'
    )


def finish(app, exception):
    """Record the runs and traces that pages show, and remove what no page needs."""
    if exception is not None:
        return
    out = Path(app.outdir)
    (out / "_static" / "runs.js").write_text(collectives.script(), encoding="utf-8")
    (out / "_static" / "recorded_traces.js").write_text(traces.script(), encoding="utf-8")
    slim.slim_theme(out, slim.slim_pages(out))
    slim.search_the_article(out)
    slim.slim_pictures(out)


def setup(app):
    """Connect the functions above."""
    app.connect("source-read", read_source)
    app.connect("doctree-read", read_document, priority=400)  # before Sphinx collects what is downloaded
    app.connect("html-collect-pages", add_library)
    app.connect("html-page-context", describe_page)
    app.connect("build-finished", finish)
