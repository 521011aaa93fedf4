"""Claims about the later chapters' notebooks: each executes from a clean state, as the first ones do in `make test`."""

import pytest
from test_chapters import CHAPTERS, execute_from_a_clean_state


@pytest.mark.parametrize("chapter", CHAPTERS[3:], ids=lambda path: path.stem)
def test_notebook_executes_from_a_clean_state(chapter, tmp_path, monkeypatch):
    execute_from_a_clean_state(chapter, tmp_path, monkeypatch)
