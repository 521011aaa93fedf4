"""Fixtures of the tests that draw files."""

import json

import pytest

from visualize import style


@pytest.fixture
def write(tmp_path):
    """Make a function that writes a text, or a value as JSON, and returns the path."""

    def write(name, text) -> str:
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return str(tmp_path / name)

    return write


@pytest.fixture
def drawn(monkeypatch):
    """Collect the pictures that the command saves, which are written nowhere."""
    figures = []

    def save(figure, path):
        figures.append(figure)

    monkeypatch.setattr(style, "save", save)
    return figures
