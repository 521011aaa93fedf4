"""Claims about the lists of chapters 7 and 8: what chapter 8 takes from a file is what chapter 7 builds."""

import ast

import numpy as np
import pytest
from launcher import ROOT

from chapters.support import schedule_lists
from chapters.support.pipeline_runs import gradients_on_one_device
from chapters.support.schedule_lists import idle, library_lists, needs, run_list
from minipar.comm import run_local
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make

SHARED = {"as_text", "library_lists", "timed", "idle", "longest_path", "written"}


def functions(path):
    """The text of each function of a file, without its comments."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {each.name: ast.unparse(each) for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_what_chapter_8_takes_from_chapter_7_is_the_same():
    built, kept = functions("chapters/07_pipeline.py"), functions("chapters/support/schedule_lists.py")
    assert set(kept) == SHARED | {"needs", "run_list"}
    assert {name: built[name] for name in SHARED} == {name: kept[name] for name in SHARED}


def test_needs_adds_i_and_w_to_chapter_7s():
    found = {}
    exec(functions("chapters/07_pipeline.py")["needs"], found)
    for kind, s in (("F", 0), ("F", 2), ("B", 0), ("B", 3)):
        assert needs(kind, 1, s, 3) == found["needs"](kind, 1, s, 3)
    assert needs("I", 1, 2, 3) == [("F", 1, 2), ("I", 1, 3)] and needs("W", 1, 2, 3) == [("I", 1, 2)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zbv"])
def test_idle_is_the_librarys(name):
    line = simulate(make(name, 4, 8), Durations(4, 5, 3))
    assert idle(library_lists(name, 4, 8), {"F": 4, "I": 5, "W": 3, "B": 8}) == line.makespan * line.bubble_fraction


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_a_list_on_the_ranks_gives_one_devices_gradients(name):
    weights, batch = np.random.default_rng(0).normal(size=(3, 4, 4)), np.random.default_rng(1).normal(size=(5, 2, 4))
    found = run_local(3, run_list, library_lists(name, 3, 5), weights, batch)
    assert np.array_equal(found, gradients_on_one_device(weights, batch))
    assert schedule_lists.as_text(library_lists(name, 1, 1)[0][:1]) == "0F0"
