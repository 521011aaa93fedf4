"""Every cell of the tables of docs/museum.md is what the planted mistake does, detections and misses."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from museum.exhibits import exhibits
from mutation import ROOT, environment, mutated_tree

from minipar.compare.differences import Finding, compare

VISIBLE = 0.01  # relative: what a person sees in a plot of two curves
CLEAR = 1.25  # no curve's difference is so near the limit that rounding could decide
SECONDS = 120  # for one run

EXHIBITS = exhibits()
by_number = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: str(exhibit.number))


def look(tree: Path, flags: str, record: Path) -> dict:
    """Run the instruments in a process of their own, on the code of this tree."""
    program = [sys.executable, str(tree / "tests" / "release" / "museum" / "instruments.py"), "--record", str(record)]
    run = subprocess.run(
        [*program, *flags.split()], env=environment(tree), capture_output=True, text=True, timeout=SECONDS, cwd=tree
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[int | str, tuple[dict, Path]]:
    """Measure every right layout, by its flags, and every mistake, by its number: what is read, and the record."""
    folder = tmp_path_factory.mktemp("museum")

    def right(flags: str, number: int) -> tuple[dict, Path]:
        record = folder / f"right-{number}"
        return look(ROOT, flags, record), record

    def wrong(exhibit) -> tuple[dict, Path]:
        record = folder / f"wrong-{exhibit.number}"
        return look(mutated_tree(exhibit.mutation, folder / f"tree-{exhibit.number}"), exhibit.flags, record), record

    with ThreadPoolExecutor(2) as pool:
        layouts = {flags: pool.submit(right, flags, i) for i, flags in enumerate({e.flags for e in EXHIBITS})}
        mistakes = {exhibit.number: pool.submit(wrong, exhibit) for exhibit in EXHIBITS}
        return {key: task.result() for key, task in (layouts | mistakes).items()}


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def see(wrong: list[float], right: list[float]) -> bool:
    """Return whether the curves visibly differ; a difference near the limit proves nothing."""
    largest = largest_difference(wrong, right)
    assert not VISIBLE / CLEAR < largest < VISIBLE * CLEAR, f"a difference of {largest:.4f} is near the limit"
    return largest > VISIBLE


def row_of(finding: Finding) -> dict[str, str]:
    """Return the row of the document's table: the first difference with a factor of the layout, or else the first."""
    if finding.equal:
        return {"step": "", "quantity": "", "B / A": "", "of": ""}
    explained = (each for each in finding.differences if any("=" in cause for cause in each.causes))
    shown = next(explained, finding.differences[0])
    ratio = "none" if shown.ratio is None else f"{shown.ratio:.6g}"
    return {"step": str(finding.step), "quantity": shown.quantity, "B / A": ratio, "of": shown.group}


@by_number
def test_the_instruments_say_what_the_table_says(exhibit, measured):
    (wrong, record), (right, right_record) = measured[exhibit.number], measured[exhibit.flags]
    said = {
        "loss": see(wrong["losses"], right["losses"]),
        "norm": see(wrong["norms"], right["norms"]),
        "compare": not compare(right_record, record).equal,
        **{name: wrong[name] for name in ("ranks", "verify", "bytes", "memory", "schedule")},
    }
    assert said == exhibit.cells


@by_number
def test_compare_names_what_the_table_says(exhibit, measured):
    row = row_of(compare(measured[exhibit.flags][1], measured[exhibit.number][1]))
    assert row == {title: exhibit.found[title] for title in row}


def test_the_instruments_are_silent_on_the_right_code(measured):
    for flags in {exhibit.flags for exhibit in EXHIBITS}:
        right, _ = measured[flags]
        assert not any(right[name] for name in ("ranks", "verify", "bytes", "memory", "schedule")), flags
