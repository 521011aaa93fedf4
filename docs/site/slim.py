"""What is removed from the theme after the build, so that a page is light: 1.6 MB of icons as a script, and more.

Each removal is an error if there is nothing to remove: a new version of the theme may need another one.
"""

import re
from pathlib import Path

from PIL import Image

ICONS = re.compile(r'\s*<script defer src="[^"]*fontawesome\.js[^"]*"></script>')
SEARCH = re.compile(r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>')
ICON_RULE = re.compile(r"((?:\.fa-[a-z0-9-]+,)*\.fa-[a-z0-9-]+)\{--fa:[^}]*\}")
LARGE = 20_000  # bytes
COLOURS = 256


def remove(pattern: re.Pattern[str], text: str, place: object) -> str:
    """Remove what a pattern finds. ValueError if it finds nothing."""
    text, count = pattern.subn("", text)
    if not count:
        raise ValueError(f"{place}: found nothing like {pattern.pattern}; has the theme changed?")
    return text


def slim_pages(out: Path) -> set[str]:
    """Remove scripts that pages do not need. Return the names of the icons that pages show."""
    icons: set[str] = set()
    for path in sorted(out.rglob("*.html")):
        if path.is_relative_to(out / "_static"):
            continue
        text = path.read_text(encoding="utf-8")
        if "fontawesome.js" not in text:  # the page that leads to the first one
            continue
        text = remove(ICONS, text, path)
        if path.name != "search.html":
            text = remove(SEARCH, text, path)
        icons |= set(re.findall(r"\bfa-([a-z-]+)", text))
        path.write_text(text, encoding="utf-8")
    return icons


def slim_theme(out: Path, icons: set[str]) -> None:
    """Remove the icons' script, the names of icons that no page shows, and the maps of sources."""
    static = out / "_static"
    for path in {*static.rglob("*.map"), *static.glob("scripts/fontawesome.js*")}:
        path.unlink()
    sheet = static / "styles" / "pydata-sphinx-theme.css"
    text = sheet.read_text(encoding="utf-8")
    script = (static / "scripts" / "pydata-sphinx-theme.js").read_text(encoding="utf-8")
    kept = {f".fa-{name}" for name in icons | set(re.findall(r"\bfa-([a-z-]+)", script))}
    text, count = ICON_RULE.subn(lambda rule: rule[0] if kept & set(rule[1].split(",")) else "", text)
    if not count:
        raise ValueError(f"{sheet}: found no icons; has the theme changed?")
    sheet.write_text(text, encoding="utf-8")


def search_the_article(out: Path) -> None:
    """Let excerpts of the search come from a page's article; a theme's main part begins with menus."""
    path = out / "_static" / "searchtools.js"
    text = path.read_text(encoding="utf-8")
    if text.count("'[role=\"main\"]'") != 1:
        raise ValueError(f"{path}: no main part of a page; has Sphinx changed?")
    text = text.replace("'[role=\"main\"]'", "'article.bd-article'")
    path.write_text(text.replace('`[role="main"] ${anchor}`', "`article.bd-article ${anchor}`"), encoding="utf-8")


def slim_pictures(out: Path) -> None:
    """Write large pictures with a palette: they are drawn in few colours, and take a third of the bytes."""
    for path in sorted((out / "_images").glob("*.png")):
        if path.stat().st_size < LARGE:
            continue
        with Image.open(path) as picture:
            whole = picture.convert("RGB")
        # Without rounds of k-means, rare colours, such as the ends of a colour scale, would share one.
        small = whole.quantize(COLOURS, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
