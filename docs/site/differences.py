"""The examples side by side: what changes in a program from one strategy to the next."""

import html
import sys
from difflib import SequenceMatcher
from itertools import zip_longest

from notebooks import ROOT
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

sys.path.append(str(ROOT / "docs" / "examples"))

from ladder import LADDER

PAIRS = (
    *((before, after, sentence) for before, after, _, sentence in LADDER),
    ("ddp", "expert", "A Mixtral takes GPT's place, and its experts are shared out."),
    ("stages", "resume", "The same with a schedule of the learning rate, clipping, saving and resuming."),
)


def source(name: str) -> str:
    """Return the text of an example."""
    return (ROOT / "docs" / "examples" / f"{name}.py").read_text(encoding="utf-8")


def rows(before: list[str], after: list[str]) -> list[tuple[str, str, str]]:
    """Return (kind, line before, line after) for each row: equal, delete, insert or replace."""
    found = []
    for kind, i, j, k, n in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        found += [(kind, left, right) for left, right in zip_longest(before[i:j], after[k:n], fillvalue="")]
    return found


def coloured(line: str) -> str:
    """Return a line of Python as HTML."""
    return highlight(line, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")


def cell(kind: str, mark: str, text: str) -> str:
    """Return one line of one program as a cell."""
    look = kind if text or kind == "equal" else "nothing"
    return f'<td class="{look}"><span class="sign">{mark}</span><code>{coloured(text)}</code></td>'


def difference(first: str, second: str) -> str:
    """Return two examples as a table of two columns, with marks at the lines that differ."""
    before = source(first).splitlines()
    after = source(second).splitlines()
    lines = []
    for kind, left, right in rows(before, after):
        marks = ("", "") if kind == "equal" else ("−" if left else "", "+" if right else "")
        cells = [cell(kind, mark, text) for mark, text in zip(marks, (left, right), strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{name}.py</th>" for name in (first, second))
    return (
        '<div class="scrolls highlight" tabindex="0"><table class="differences"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def page() -> str:
    """Return the page of all differences."""
    parts = [
        "<h1>From one strategy to the next</h1>",
        '<p>The <a href="README.html">examples</a> share one skeleton: batches, a model, an optimizer, a loop. So the '
        "difference of two of them is what a strategy asks of a program. Marked lines differ.</p>",
    ]
    for first, second, sentence in PAIRS:
        title = html.escape(f"{first}.py → {second}.py")
        head = f'<section id="{first}-{second}"><h2>{title}</h2>\n<p>{sentence}</p>'
        parts.append(f"{head}\n{difference(first, second)}</section>")
    return "\n".join(parts)
