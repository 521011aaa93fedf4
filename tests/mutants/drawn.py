"""Mutants drawn at random: operators change the code anywhere, and the tests that execute the line must notice.

    PYTHONPATH=tests:tests/helpers python -m mutants.drawn --seed 7 8 --count 300 --jobs 2

One line for each mutant, then the share that is caught of each package and seed, the survivors with their difference,
and those that equivalent.txt judges equivalent. A mutant is equivalent only if it is listed and no test notices it.
Those listed and not drawn run too, many in one tree, against the quickest tests. The exit code is 1 if fewer than
ENOUGH of the others are caught, or if a listed one is.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mutants.drawing import code, difference, draw, every_change, line_number, package, source
from mutants.first_failure import DEADLINES, HANGS
from mutants.judge import BROKEN, CAUGHT, PASSED, SURVIVED, TIMED_OUT, end_all, run_tests, without_mistakes
from mutants.lines import MeasuredTest, files_of_tests, tests_that_execute
from mutants.operators import Change
from mutation import ROOT, copied_tree

ENOUGH = 0.97
EQUIVALENT = "equivalent"
NO_TEST = "no test executes it"
LISTED = ROOT / "tests" / "mutants" / "equivalent.txt"
QUICK_SECONDS = 5.0  # of tests that run first, in a process of their own: most mutants need few
MOST_SECONDS = 60.0  # of tests against one mutant in a round, the quickest first; the rest run after all rounds
SLOWER = 8.0  # times as long as without a mistake, and SLACK seconds more, is a hang
SLACK = 30.0
TestsFor = Callable[[Change], Iterable[Sequence[MeasuredTest]]]


@dataclass(frozen=True)
class Outcome:
    """What has come of one mutant: `note` is the test that caught it, or what ran.

    `reason` is that of the list of equivalents, if it has this mutant.
    """

    change: Change
    outcome: str
    note: str
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        file, line = self.change.file, line_number(self.change)
        return f"{self.outcome:<10} {self.seconds:6.1f} s  {file}:{line} {self.change.operator}  [{self.note}]"


# ---- those judged equivalent -----------------------------------------------------------------------------------------


def listed(text: str) -> dict[tuple[str, ...], str]:
    """Read the list: for each file and difference the reason. No line number counts, so that it survives edits."""
    reasons = {}
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if not part.startswith("#")]
    for paragraph in paragraphs:
        file, *rest = paragraph.strip().splitlines()
        changed = [line for line in rest if line.startswith(("- ", "+ "))]
        reason = [line for line in rest if line not in changed]
        if not changed or not reason:
            raise ValueError(f"expected a file, lines with - and +, and a reason, in: {paragraph}")
        reasons[file, *changed] = " ".join(reason)
    return reasons


def changes_of(entry: tuple[str, ...]) -> list[Change]:
    """Return the mistakes that an entry of the list describes: one, unless a file has the same line twice."""
    file, *changed = entry
    old = {line[2:] for line in changed if line.startswith("- ")}
    rows = source(file).splitlines()
    near = [change for change in every_change(file) if rows[line_number(change) - 1].strip() in old]
    return [change for change in near if difference(change) == changed]


def with_reason(outcome: Outcome, reasons: dict[tuple[str, ...], str]) -> Outcome:
    """Call a mutant equivalent if it is listed, and tests have run and have not noticed it."""
    reason = reasons.get((outcome.change.file, *difference(outcome.change)), "")
    if reason and outcome.outcome == SURVIVED and outcome.note != NO_TEST:
        return replace(outcome, outcome=EQUIVALENT, reason=reason)
    return replace(outcome, reason=reason)


# ---- judging ---------------------------------------------------------------------------------------------------------


def chosen_for(change: Change, tests: Sequence[MeasuredTest]) -> tuple[list[MeasuredTest], list[MeasuredTest]]:
    """Return the tests that execute what is changed, the quickest first: those that run at once, and those after."""
    chosen = [test for test in tests if test.executes(change.file, change.lines)]
    quick: list[MeasuredTest] = []
    slow: list[MeasuredTest] = []
    seconds = 0.0
    for test in chosen:
        seconds += test.seconds
        if seconds <= QUICK_SECONDS:
            quick.append(test)
        elif seconds <= MOST_SECONDS or not slow:
            slow.append(test)
    return quick, slow


def place_of_tests(change: Change) -> str:
    """Return how the paths of the package's tests begin; those of files directly in minipar are directly in tests."""
    name = package(change.file)
    return "tests/test_" if name == "minipar" else f"tests/{name}/"


def of_package(change: Change, tests: Sequence[MeasuredTest]) -> list[MeasuredTest]:
    """Return all tests of the package, for lines of which too little is known.

    A killed process leaves no measurement. What an import executes is measured for no test, and modules that no test
    connects with it may read its values.
    """
    return [test for test in tests if test.name.startswith(place_of_tests(change))]


def runs_at_import(change: Change) -> bool:
    """Say whether an import executes what is changed: a value of the module, of a class, or a default."""
    return line_number(change) not in change.lines


def names_module(file: str, module: str) -> bool:
    """Say whether a file of tests names a module of the code: imports it, or is called after it."""
    package_name, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    words = rf"\b{re.escape(package_name)}(\.{name}\b| import [^\n]*\b{name}\b)"
    return Path(file).stem == f"test_{name}" or re.search(words, source(file)) is not None


def rounds(change: Change, files: Sequence[str]) -> list[list[str]]:
    """Divide files of tests into three rounds: of the package those that name the module, the others, and the rest."""
    own = [file for file in files if file.startswith(place_of_tests(change))]
    naming = [file for file in own if names_module(file, change.file)]
    return [naming, [file for file in own if file not in naming], [file for file in files if file not in own]]


def tests_in_rounds(change: Change, files: Sequence[str]) -> Iterator[list[MeasuredTest]]:
    """Yield the tests of each round. The lines that they execute are measured then: a mutant seldom needs them all."""
    for chosen in rounds(change, files):
        if chosen:
            yield tests_that_execute(chosen)


def quickest(change: Change, rounds_of_tests: Iterable[Sequence[MeasuredTest]]) -> Iterator[list[MeasuredTest]]:
    """Yield the tests that run at once, of the first round that has some."""
    for tests in rounds_of_tests:
        quick, _ = chosen_for(change, tests)
        if quick:
            yield quick
            return


def with_mistakes(changes: Iterable[Change], folder: Path) -> Path:
    """Make `folder` a copy of the tree with these mistakes, no two of which touch, and return it."""
    tree = copied_tree(folder)
    texts: dict[str, str] = {}
    for change in sorted(changes, key=lambda change: -change.start):  # those before it stay where they are
        texts[change.file] = change.apply(texts.get(change.file, source(change.file)))
    for file, text in texts.items():
        (tree / file).write_text(text, encoding="utf-8")
    return tree


def judge(change: Change, rounds_of_tests: Iterable[Sequence[MeasuredTest]], folder: Path) -> Outcome:
    """Put the mistake into a copy of the tree, in `folder`, and run tests there, round by round, until one fails.

    What the rounds have no time for runs after them.
    """
    start = time.monotonic()
    tree = with_mistakes([change], folder)
    outcome, note = SURVIVED, NO_TEST
    known: list[MeasuredTest] = []
    ran: list[str] = []
    for tests in rounds_of_tests:
        known += tests
        for group in chosen_for(change, tests):
            if group and outcome == SURVIVED:
                ran += [test.name for test in group]
                outcome, note = run_with_deadlines(tree, group)
        if outcome != SURVIVED:
            break
    rest = [test for test in known if test.executes(change.file, change.lines) and test.name not in ran]
    if outcome == SURVIVED and rest:  # only what all tests of its line pass has survived
        ran += [test.name for test in rest]
        outcome, note = run_with_deadlines(tree, rest)
    if note == NO_TEST or (outcome == SURVIVED and runs_at_import(change)):
        unmeasured = [test for test in of_package(change, known) if test.name not in ran]
        if unmeasured:
            ran += [test.name for test in unmeasured]
            outcome, note = run_with_deadlines(tree, unmeasured)
    if note == PASSED:
        note = f"passed by {len(ran)} tests"
    if outcome == TIMED_OUT:
        outcome, note = CAUGHT, f"the tests{HANGS}"
    if outcome == BROKEN:
        (tree / change.file).write_text(source(change.file), encoding="utf-8")
        if run_tests(tree, ["--collect-only", *ran], MOST_SECONDS)[0] == SURVIVED:
            outcome, note = CAUGHT, "the tests cannot be imported"
    shutil.rmtree(tree, ignore_errors=True)
    return Outcome(change, outcome, note, time.monotonic() - start)


def run_with_deadlines(tree: Path, tests: Sequence[MeasuredTest]) -> tuple[str, str]:
    """Run tests until one fails or hangs."""
    deadlines = {test.name: SLACK + SLOWER * test.seconds for test in tests}
    file = tree / "deadlines.json"
    file.write_text(json.dumps(deadlines), encoding="utf-8")
    return run_tests(tree, list(deadlines), sum(deadlines.values()), {DEADLINES: str(file)})


def proved(outcome: Outcome, failing: Sequence[str]) -> Outcome:
    """Call a mutant a survivor if what caught it is a test that fails without a mistake too."""
    if outcome.outcome == CAUGHT and outcome.note.removesuffix(HANGS) in failing:
        return replace(outcome, outcome=SURVIVED, note=f"{outcome.note} fails without a mistake too")
    return outcome


def run(drawn: Sequence[Change], tests_for: TestsFor, jobs: int, scratch: Path) -> list[Outcome]:
    """Judge these mutants, `jobs` at a time, and print each outcome at once. `tests_for` gives a mutant's rounds."""
    reasons = listed(LISTED.read_text(encoding="utf-8"))

    def outcome_of(i: int) -> Outcome:
        found = with_reason(judge(drawn[i], tests_for(drawn[i]), scratch / str(i)), reasons)
        print(found, flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(outcome_of, range(len(drawn))))
        except BaseException:  # Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


# ---- checking the list ----------------------------------------------------------------------------------------------


def touch(one: Change, other: Change) -> bool:
    """Say whether two mistakes change the same text, so that they do not fit into one tree."""
    return one.file == other.file and one.start < other.end and other.start < one.end


def groups_of(changes: Iterable[Change]) -> list[list[Change]]:
    """Divide mistakes into groups, each of which fits into one tree."""
    groups: list[list[Change]] = []
    for change in changes:
        fitting = [group for group in groups if not any(touch(change, other) for other in group)]
        if not fitting:
            groups.append([])
        (fitting or groups[-1:])[0].append(change)
    return groups


def check_listed(not_drawn: Sequence[Change], quick_tests_for: TestsFor, jobs: int, scratch: Path) -> list[Outcome]:
    """Judge mutants that are listed and not drawn, which no test should notice; return the outcome of those it does.

    Many are put into one tree, against the quickest tests of each; where a test fails, each runs alone.
    """
    noticed = []
    for number, group in enumerate(groups_of(not_drawn)):
        quick: dict[str, MeasuredTest] = {}
        for change in group:
            for tests in quick_tests_for(change):
                quick |= {test.name: test for test in tests}
        if not quick:
            continue
        tree = with_mistakes(group, scratch / f"group {number}")
        outcome, note = run_with_deadlines(tree, [quick[name] for name in sorted(quick)])
        shutil.rmtree(tree, ignore_errors=True)
        print(f"{len(group)} listed mutants and {len(quick)} tests: {outcome} {note}", flush=True)
        if outcome != SURVIVED:
            noticed += run(group, quick_tests_for, jobs, scratch / f"alone {number}")
    return noticed


# ---- reporting -------------------------------------------------------------------------------------------------------


def share(outcomes: Sequence[Outcome]) -> float:
    """Return which part is caught of those that are not equivalent; 1 of none."""
    judged = [each for each in outcomes if each.outcome != EQUIVALENT]
    caught = [each for each in judged if each.outcome == CAUGHT]
    return len(caught) / len(judged) if judged else 1.0


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the share of each package, the survivors with their difference, and those judged equivalent."""
    rows = ["", f"{'package':<12} {'drawn':>6} {'equivalent':>11} {'caught':>7} {'hanging':>8} {'share':>7}"]
    packages = sorted({package(each.change.file) for each in outcomes})
    for name in [*packages, "all"]:
        of_package = [each for each in outcomes if name in ("all", package(each.change.file))]
        equivalent, caught = [sum(each.outcome == kind for each in of_package) for kind in (EQUIVALENT, CAUGHT)]
        hanging = sum(each.note.endswith(HANGS) for each in of_package)  # they are among those caught
        counts = f"{len(of_package):>6} {equivalent:>11} {caught:>7} {hanging:>8}"
        rows.append(f"{name:<12} {counts} {share(of_package):>7.1%}")
    for each in outcomes:
        if each.outcome != CAUGHT:
            rows += ["", f"{each.outcome}: {each.change.file}:{line_number(each.change)} ({each.change.operator})"]
            rows += [*difference(each.change), each.note]
            rows += [each.reason] if each.reason else []
    return "\n".join(rows)


def wrong_entries(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the list of equivalents says wrongly: a test has caught the mutant."""
    caught = [each for each in outcomes if each.reason and each.outcome == CAUGHT]
    return [
        f"{LISTED.name} is wrong about {each.change.file}:{line_number(each.change)}: {each.note} catches it"
        for each in caught
    ]


def main(argv: Sequence[str]) -> int:
    """Draw mutants, judge them, report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="mutants.drawn", description="Run random mutants against the tests.")
    parser.add_argument("--seed", type=int, nargs="+", required=True, help="another seed draws other mutants")
    parser.add_argument("--count", type=int, default=300, help="how many mutants each seed draws (default: 300)")
    parser.add_argument("--files", default="", help="regular expression: of which files (default: all)")
    parser.add_argument("--tests", default="", help="regular expression: which files of tests (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    args = parser.parse_args(argv)
    start = time.monotonic()
    files = [file for file in code() if re.search(args.files, file)]
    of_seed = {seed: draw(files, seed, args.count) for seed in args.seed}
    drawn = list(dict.fromkeys(change for changes_drawn in of_seed.values() for change in changes_drawn))
    entries = [entry for entry in listed(LISTED.read_text(encoding="utf-8")) if entry[0] in files]
    not_drawn = [change for entry in entries for change in changes_of(entry) if change not in drawn]
    files_that_test = [file for file in files_of_tests() if re.search(args.tests, file)]

    def tests_for(change: Change) -> Iterator[list[MeasuredTest]]:
        return tests_in_rounds(change, files_that_test)

    def quick_tests_for(change: Change) -> Iterator[list[MeasuredTest]]:
        return quickest(change, tests_for(change))

    with tempfile.TemporaryDirectory(prefix="minipar-mutants-") as folder:
        every = run(drawn, tests_for, args.jobs, Path(folder) / "drawn")
        every += check_listed(not_drawn, quick_tests_for, args.jobs, Path(folder) / "listed")
        noticed = [each.note.removesuffix(HANGS) for each in every if each.outcome == CAUGHT and "::" in each.note]
        failing = without_mistakes(noticed, Path(folder) / "right")  # a test that fails by itself proves nothing
    every = [proved(each, failing) for each in every]
    outcomes = every[: len(drawn)]
    print(report(outcomes))
    for seed, changes_drawn in of_seed.items():
        judged = [each for each in outcomes if each.change in changes_drawn]
        print(f"\n{len(judged)} mutants of seed {seed}, {share(judged):.1%} caught", end="")
    print(f", in {(time.monotonic() - start) / 60:.1f} minutes")
    problems = [f"{test} fails without a mistake too" for test in failing] + wrong_entries(every)
    print("".join(f"{problem}\n" for problem in problems), file=sys.stderr, end="")
    return 1 if problems or share(outcomes) < ENOUGH else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
