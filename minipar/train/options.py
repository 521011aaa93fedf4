"""A command line from frozen dataclasses: every field is declared once, and is the flag.

`option` gives a field its default, its range and its help text; the parser, the defaults and the range checks are all
read from there. A configuration is a dataclass of sections, each a dataclass of options:

    @dataclass(frozen=True)
    class Shape:
        "shape: how large"
        layers: int = option(2, int, "Transformer layers", within="[1, inf)", metavar="L")

    @dataclass(frozen=True)
    class Config:
        shape: Shape = Shape()

    config, given = parse_into(Config(), ["--layers", "4"], prog="...", description="...")
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from minipar.errors import UsageError, UsageParser

Config = TypeVar("Config")


def option(
    default: Any,
    kind: Callable[[str], Any],
    help: str,
    *,
    within: str | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: Any = None,
    flag: str | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    `kind` is int, float, str, bool (a switch), or a function that makes the value of a text; `within` an interval as
    mathematics writes it, "[0, 1)"; `flag` the long name when it is not the field's own name with dashes. A tuple
    default takes as many values as it has.
    """
    metadata = {"kind": kind, "help": help, "within": within, "choices": choices, "metavar": metavar, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_count(text: str) -> int:
    """A kind of option: "1500000", "1.5MB", "512KiB" -> bytes, at least 1."""
    number = text.rstrip("KMGiB ")
    try:
        count = float(number) * UNITS[text[len(number) :].strip()]
        if not 1 <= count < math.inf:
            raise ValueError
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes such as 1500000, 1.5MB or 512KiB"
        ) from None
    return int(count)


def flags(config: Any) -> Iterator[tuple[str, dataclasses.Field[Any], str, Any]]:
    """Every flag of a configuration: (section, field, flag, value in `config`)."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            yield section.name, field, flag, getattr(values, field.name)


def inside(value: float, interval: str) -> bool:
    """Whether `value` lies in an interval such as "[0, 1)" or "(0, inf)"; nan lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def check_options(config: Any) -> None:
    """Raise UsageError for a value outside its interval or its choices, or an empty path."""
    for _, field, flag, value in flags(config):
        within, choices = field.metadata["within"], field.metadata["choices"]
        for one in value if isinstance(value, tuple) else (value,):
            if within is not None and one is not None and not inside(one, within):
                raise UsageError(f"{flag} {one} is outside {within}")
        if choices is not None and value not in choices:
            raise UsageError(f"{flag} {value}: choose from {', '.join(choices)}")
        if value == "":
            raise UsageError(f"{flag} is empty; expected {field.metadata['metavar']}")


def _parser(defaults: Any, prog: str, description: str, rank: int) -> UsageParser:
    # No abbreviations: one that works today would be ambiguous with tomorrow's flag.
    parser = UsageParser(prog=prog, description=description, allow_abbrev=False, prints=rank == 0)
    groups: dict[str, Any] = {}
    for section, field, flag, default in flags(defaults):
        if section not in groups:
            groups[section] = parser.add_argument_group(getattr(defaults, section).__doc__)
        told = field.metadata
        arguments: dict[str, Any] = {"help": told["help"]}
        if told["kind"] is bool:
            arguments["action"] = "store_true"
        else:
            arguments |= {"type": told["kind"], "choices": told["choices"], "metavar": told["metavar"]}
            if isinstance(default, tuple):
                arguments["nargs"] = len(default)
            if default is not None:
                shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
                arguments["help"] += f" (default: {shown})"
        # SUPPRESS: the result holds only what the user wrote; the dataclasses hold the defaults.
        groups[section].add_argument(flag, dest=f"{section}.{field.name}", default=argparse.SUPPRESS, **arguments)
    return parser


def parse_into(
    defaults: Config, argv: Sequence[str], *, prog: str, description: str, rank: int = 0
) -> tuple[Config, frozenset[str]]:
    """`defaults` with what `argv` says in place, its options checked, and the names given, as "section.field".

    `--help` prints on rank 0 and raises SystemExit(0) on every rank; UsageError where argparse would exit with 2.
    """
    given = vars(_parser(defaults, prog, description, rank).parse_args(argv))
    config: Any = defaults
    for name, value in given.items():
        section, field = name.split(".")
        values = dataclasses.replace(
            getattr(config, section), **{field: tuple(value) if isinstance(value, list) else value}
        )
        config = dataclasses.replace(config, **{section: values})
    check_options(config)
    return config, frozenset(given)
