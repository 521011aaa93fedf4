"""Claims about docs/museum.md: every cell of its tables is what the planted mistake does, detections and misses.

The short tests say that each mistake still applies to the code. The long ones plant it and measure.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from museum.exhibits import DOCUMENT, INSTRUMENTS, exhibits
from mutation import ROOT, environment, mutated_tree

from minipar.compare.differences import Finding, compare

VISIBLE = 0.01  # relative: what a person sees in a plot of two curves
CLEAR = 1.25  # no curve's difference is so near the limit that rounding could decide
SECONDS = 120  # for one run

EXHIBITS = exhibits()
by_number = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: str(exhibit.number))


# ---- the document ----------------------------------------------------------------------------------------------------


def test_there_are_31_mistakes_each_from_its_own_thread():
    assert [exhibit.number for exhibit in EXHIBITS] == list(range(1, 32))
    assert len({exhibit.thread for exhibit in EXHIBITS}) == 31


@by_number
def test_a_mistake_still_applies_to_the_code(exhibit):
    mutation = exhibit.mutation
    assert mutation.apply((ROOT / mutation.file).read_text(encoding="utf-8"))
    assert "\n" not in mutation.old + mutation.new


def test_every_instrument_detects_some_and_misses_some():
    for name in INSTRUMENTS:
        assert {True, False} <= {exhibit.cells[name] for exhibit in EXHIBITS}, name


def test_the_sentences_below_the_table_agree_with_it():
    text = DOCUMENT.read_text(encoding="utf-8")
    counts = {name: sum(exhibit.cells[name] is True for exhibit in EXHIBITS) for name in INSTRUMENTS}
    assert {name: int(count) for name, count in re.findall(r"\*\*(\w+)\*\*\s+detects\s+(\d+)", text)} == counts
    unseen = [exhibit for exhibit in EXHIBITS if not exhibit.cells["verify"]]
    for opening, is_different in (("exhibits", True), ("Exhibits", False)):
        (listed,) = re.findall(rf"{opening} ((?:\d+, )*\d+ and \d+)", text)
        numbers = [exhibit.number for exhibit in unseen if exhibit.cells["compare"] == is_different]
        assert [int(number) for number in re.findall(r"\d+", listed)] == numbers


def test_compare_gives_19_a_group_and_a_factor():
    assert sum(exhibit.found["B / A"] not in ("", "none") for exhibit in EXHIBITS) == 19


# ---- the measurement -------------------------------------------------------------------------------------------------


def look(tree: Path, flags: str, record: Path) -> dict:
    """Run the instruments in a process of their own, on the code of this tree."""
    program = [sys.executable, str(tree / "tests" / "museum" / "instruments.py"), "--record", str(record)]
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


@pytest.mark.long
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


@pytest.mark.long
@by_number
def test_compare_names_what_the_table_says(exhibit, measured):
    row = row_of(compare(measured[exhibit.flags][1], measured[exhibit.number][1]))
    assert row == {title: exhibit.found[title] for title in row}


@pytest.mark.long
def test_the_instruments_are_silent_on_the_right_code(measured):
    for flags in {exhibit.flags for exhibit in EXHIBITS}:
        right, _ = measured[flags]
        assert not any(right[name] for name in ("ranks", "verify", "bytes", "memory", "schedule")), flags
