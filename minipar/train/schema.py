"""Kinds of JSON values, from which a table says what a file may hold.

`kind.check(value, place)` raises ValueError.
`place` is where the value is in the file, such as `files[0].pieces[3].stop`, for the error.
A value is not converted, so that True is no number and 1.0 is no whole number.
"""

import os
import re
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol


class Kind(Protocol):
    """A kind of JSON value."""

    def check(self, value: Any, place: str) -> None:
        """Raise ValueError, with the place and the value, if it is not of this kind."""


def refuse(value: Any, place: str, expected: str) -> NoReturn:
    """Raise the ValueError of a value that is not what was expected."""
    raise ValueError(f"{place or 'it'} is {reprlib.repr(value)}, expected {expected}")


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int = 0
    most: int = 2**63 - 1

    def check(self, value: Any, place: str) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            refuse(value, place, f"a whole number from {self.least} to {self.most}")


@dataclass(frozen=True)
class Number:
    """A finite number of at least `least`, whole or not."""

    least: float = -sys.float_info.max

    def check(self, value: Any, place: str) -> None:
        if type(value) not in (int, float) or not self.least <= value <= sys.float_info.max:
            refuse(value, place, f"a finite number of at least {self.least:g}")


@dataclass(frozen=True)
class Truth:
    """True or false."""

    def check(self, value: Any, place: str) -> None:
        if type(value) is not bool:
            refuse(value, place, "true or false")


@dataclass(frozen=True)
class Text:
    """A text that can be a file's name, and that the regular expression describes if there is one."""

    pattern: str | None = None

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
            refuse(value, place, "a text")
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            refuse(value, place, f"a text of the form {self.pattern}")


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    texts: Sequence[str]

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in self.texts:
            refuse(value, place, f"one of {', '.join(self.texts)}")


@dataclass(frozen=True)
class Nullable:
    """A value of a kind, or null."""

    kind: Kind

    def check(self, value: Any, place: str) -> None:
        if value is not None:
            self.kind.check(value, place)


@dataclass(frozen=True)
class ListOf:
    """A list of at least `least` values of one kind."""

    kind: Kind
    least: int = 0

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) < self.least:
            refuse(value, place, f"a list of at least {self.least} values")
        for i, each in enumerate(value):
            self.kind.check(each, f"{place}[{i}]")


@dataclass(frozen=True)
class Row:
    """A list of so many values, of one kind each."""

    kinds: Sequence[Kind]

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) != len(self.kinds):
            refuse(value, place, f"a list of {len(self.kinds)} values")
        for i, kind in enumerate(self.kinds):
            kind.check(value[i], f"{place}[{i}]")


@dataclass(frozen=True)
class MapOf:
    """An object with any texts as keys, and values of one kind."""

    kind: Kind

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            refuse(value, place, "an object")
        for key, each in value.items():
            self.kind.check(each, f"{place}[{reprlib.repr(key)}]")


@dataclass(frozen=True)
class Record:
    """An object with these keys, of one kind each. It can lack the optional ones.

    `closed`: it has no other keys.
    """

    keys: dict[str, Kind]
    optional: dict[str, Kind] = field(default_factory=dict)
    closed: bool = False

    def check(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            refuse(value, place, "an object")
        for key in self.keys:
            if key not in value:
                raise ValueError(f"{place or 'the manifest'} lacks {key!r}")
        kinds = self.keys | self.optional
        for key, each in value.items():
            if key in kinds:
                kinds[key].check(each, f"{place}.{key}" if place else key)
            elif self.closed:
                refuse(key, f"a key of {place}", f"one of {', '.join(kinds)}")
