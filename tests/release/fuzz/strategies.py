"""Strategies: values that a program does not expect, in JSON, in files and on command lines, beside those it does.

Most cases are a valid input with a few changes, because random bytes fail at the first character that is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuzz.worker import Case
from hypothesis import strategies as st


class Raw(str):
    """JSON text that `to_json` writes as it is: what Python's writer refuses, or what no Python value has."""


ODD = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1.5, -0.0, 1e-300, 1e308, 2**31, 2**63, 2**64, 10**18, 10**30, 10**400,
    float("nan"), float("inf"), float("-inf"), Raw("1e999"), Raw("9" * 5000), Raw("[" * 100_000), Raw('{"a":' * 5000),
    Raw("[" * 500 + "]" * 500), Raw(""), Raw("NULL"), "", "1", "gpt2", "a\nb", "\x1b[31mred", "\ud800", "\x00", "é日",
    "_x", "$x^2$", "$\\frac$", "{x}", "%s", "x" * 5000, [], [1], [[]], [None] * 3, {}, {"a": 1}, {"": {}}, [{"a": []}],
]  # fmt: skip
odd_values = st.sampled_from(ODD).map(copy.deepcopy) | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)


def to_json(value: Any) -> str:
    """Write JSON, with `Raw` texts as they are, NaN and infinity as Python does, and lone surrogates escaped."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {to_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def places(value: Any) -> list[tuple[Any, ...]]:
    """Return the path of keys to every value inside of a JSON value, itself included."""
    keys: Sequence[Any] = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [(), *((key, *rest) for key in keys for rest in places(value[key]))]


@st.composite
def changed(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """A JSON value with up to `most` of its values replaced, removed, repeated, or joined by a value of another key."""
    root = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(0, most))):
        path = draw(st.sampled_from(places(root)[1:]))
        parent = root
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "scale", "remove", "repeat", "add")))
        old = parent[path[-1]]
        if kind == "remove" and len(path) > 1:
            del parent[path[-1]]
        elif kind == "repeat" and isinstance(parent, list) and len(path) > 1:
            parent.extend([copy.deepcopy(old)] * draw(st.sampled_from((1, 2, 30))))
        elif kind == "add" and isinstance(old, dict):
            old[draw(st.sampled_from(("like", "step", "a\nb", "")))] = draw(odd_values)
        elif kind == "scale" and isinstance(old, (int, float)) and not isinstance(old, bool):
            parent[path[-1]] = draw(st.sampled_from((0, -1, 2, 1000, 10**9))) * old
        else:
            parent[path[-1]] = draw(odd_values)
    return root[0]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file, now and then cut short, overwritten, repeated, or in another encoding."""
    kind = draw(st.sampled_from(["whole"] * 12 + ["cut", "insert", "overwrite", "twice", "encoding", "lines"]))
    place = draw(st.integers(0, len(content)))
    piece = draw(st.binary(max_size=6) | st.sampled_from((b"\x00" * 9, b"\xff\xfe", b"\x1b[2J", b"NaN", b"\r\n", b"}")))
    if kind == "cut":
        return content[:place]
    if kind == "insert":
        return content[:place] + piece + content[place:]
    if kind == "overwrite":
        return content[:place] + piece + content[place + len(piece) :]
    if kind == "twice":
        return content + content
    if kind == "lines":
        return content.replace(b"\n", draw(st.sampled_from((b"\r\n", b"\r", b"\n\n", b"\x85", b"\xe2\x80\xa8"))))
    if kind == "encoding":
        return b"\xef\xbb\xbf" + content if draw(st.booleans()) else content.decode("latin-1").encode("utf-16")
    return content


def json_files(valid: Any, most: int = 3) -> st.SearchStrategy[bytes]:
    """Files with a changed JSON value, now and then damaged."""
    return changed(valid, most).flatmap(lambda value: damaged(to_json(value).encode("utf-8", "surrogatepass")))


NO_FILES: list[bytes | str] = ["directory", "-> here", b""]


def or_no_file(contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes | str]:
    """A file, or in one of about ten cases a directory, a link to itself, or nothing."""
    return st.integers(0, 9).flatmap(lambda n: contents if n else st.sampled_from(NO_FILES))


STEMS = ["a", "a", "a", "_a", "a b", "a\nb", "\x1b[31ma", "é日", "$a$", "-a", "a" * 200, "{a}", "%s", "new/a"]


def names(suffix: str = "") -> st.SearchStrategy[str]:
    """Names of files, some of which could change what a terminal shows or what a picture's text means."""
    return st.sampled_from(STEMS).map(lambda stem: "./" * stem.startswith("-") + stem + suffix)


WORDS = [
    "0", "1", "2", "3", "-1", "64", "1000000000", "9" * 400, "9" * 5000, "1.5", "1e3", "1e400", "nan", "inf", "-inf",
    "", " ", " 2 ", "+2", "1_0", "0x10", "٣", "²", "true", "None", "a\nb", "\x1b[31mx", "é", "x" * 5000, "-",
    "--", "/dev/null", "/dev/full", "/dev/zero", ".", "..", "missing/file",
    "%s", "{x}", "1/0", "1/3", ":", "a,b", "[", "=",
]  # fmt: skip
words = (
    st.sampled_from(WORDS) | st.integers(-9, 99).map(str) | st.text(st.characters(exclude_characters="\0"), max_size=5)
)


@st.composite
def command_lines(
    draw: st.DrawFn, valid: Mapping[str, Sequence[str]], flags: Mapping[str, Sequence[str]], most: int = 3
) -> tuple[str, ...]:
    """The valid command line {flag: values} with up to `most` changes: a flag of `flags` with one of its values or an
    odd one, a flag left out, repeated, misspelled, or without its values, or a word of its own."""
    line = {flag: list(values) for flag, values in valid.items()}
    extra: list[str] = []
    for _ in range(draw(st.integers(0, most))):
        flag = draw(st.sampled_from(sorted(flags)))
        kind = draw(st.integers(0, 19))
        if kind < 9 and flags[flag]:
            line[flag] = draw(st.sampled_from(flags[flag])).split(" ")
        elif kind < 9:
            line[flag] = []
        elif kind < 14:
            line[flag] = [draw(words)]
        elif kind == 14:
            line.pop(flag, None)
        elif kind == 15:
            extra += [flag, draw(words)]
        elif kind == 16:
            extra.append(f"{flag}={draw(words)}")
        elif kind == 17:
            extra.append(draw(st.sampled_from((flag[:-1], flag.upper(), flag.replace("-", "_"), "--help", "-h"))))
        elif kind == 18:
            extra.append(flag)
        else:
            extra.append(draw(words))
    line_words = [word for flag, values in line.items() for word in (*([flag] if flag else []), *values)]
    return (*line_words, *extra)


@st.composite
def cases(draw: st.DrawFn, build: Callable[..., Case], **parts: st.SearchStrategy[Any]) -> Case:
    """A case that `build` makes from its parts."""
    return build(**{name: draw(part) for name, part in parts.items()})
