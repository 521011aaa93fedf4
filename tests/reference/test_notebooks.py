"""The chapters' runs that `make test` leaves out: notebooks from a clean state, and other numbers of ranks."""

import pytest
from test_chapters import CHAPTERS, LATER_RUNS, NOTEBOOKS, execute_from_a_clean_state, run_as_a_script, str_of


@pytest.mark.parametrize(("chapter", "ranks"), LATER_RUNS, ids=str_of)
def test_chapter_runs_as_a_script(chapter, ranks, tmp_path):
    run_as_a_script(chapter, ranks, tmp_path)


@pytest.mark.parametrize("chapter", [chapter for chapter in CHAPTERS if chapter not in NOTEBOOKS], ids=str_of)
def test_notebook_executes_from_a_clean_state(chapter, tmp_path, monkeypatch):
    execute_from_a_clean_state(chapter, tmp_path, monkeypatch)
