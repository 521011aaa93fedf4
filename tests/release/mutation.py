"""Planted mistakes: a line of the code replaced by a wrong one, in a copy of the tree that a test then runs."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Not copied: what starts with a dot, and these. Compiled files are copied: an unchanged module need not be compiled.
LEFT_OUT = ("out", "*.egg-info", "*.ipynb")


@dataclass(frozen=True)
class Mutation:
    """One mistake: in `file`, below the root, the text `old`, which stands there exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the file's text with the mistake. ValueError if the code has changed and the mistake must follow."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}; expected once")
        return text.replace(self.old, self.new)


def mutated_tree(mutation: Mutation, folder: Path) -> Path:
    """Make `folder` a copy of the tree that has the mistake, and return it. The tree itself is not touched.

    The tests are copied too: those that start a process start it in the directory above their own.
    """
    path = copied_tree(folder) / mutation.file
    path.write_text(mutation.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def copied_tree(folder: Path) -> Path:
    """Make `folder` a copy of the tree as it is, and return it."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", *LEFT_OUT))
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that shall import the copy: its path comes before the installed one."""
    tests = folder / "tests"
    paths = [folder, tests, tests / "helpers", tests / "release"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
