"""Fixtures of the tests that draw files."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Make a function that writes a text, or a value as JSON, and returns the path."""

    def write(name, text) -> str:
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return str(tmp_path / name)

    return write
