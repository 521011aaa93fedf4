"""A mutant: a mistake of one line, and the tests that run first against it."""

from dataclasses import dataclass

from mutation import Mutation


@dataclass(frozen=True)
class Mutant(Mutation):
    """A mutation with `first`: the tests most likely to see it, below tests/. All others of its package come after."""

    first: tuple[str, ...]


def mistakes(file: str, first: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    """Make a mutant of each (name, old, new) in `file`; `first` has the paths of its first tests, between spaces."""
    return [Mutant(name, file, old, new, tuple(first.split())) for name, old, new in rows]
