"""`make mutants`: run every mutant against the tests of its package, two at a time, and say which of them survive.

    PYTHONPATH=tests:tests/helpers python -m mutants.run "regex of names" --jobs 2

One line for each mutant, then the survivors. The exit code is 1 if fewer than ENOUGH are caught, if docs/proofs.md does
not explain a survivor, if it explains one that is caught, or if a test that has caught one fails without it too.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutants.every import EVERY, PACKAGES
from mutants.judge import CAUGHT, Judgement, end_all, judge, without_mistakes
from mutation import ROOT

ENOUGH = 0.95
DOCUMENT = ROOT / "docs" / "proofs.md"


def explained() -> set[str]:
    """Return the names of the survivors in the document's table, whose rows begin with the package and the name."""
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition("\n## Mutants\n")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    return {row[2].strip() for row in rows if row[1].strip() in PACKAGES}


def run(chosen: Sequence[tuple], jobs: int, scratch: Path) -> list[Judgement]:
    """Judge these mutants, `jobs` at a time, and print each judgement at once."""
    judgements = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(judge, package, mutant, PACKAGES[package][0], scratch / str(i))
            for i, (package, mutant) in enumerate(chosen)
        ]
        try:
            for future in as_completed(futures):
                judgements.append(future.result())
                print(judgements[-1], flush=True)
        except BaseException:  # Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    return judgements


def problems(judgements: Sequence[Judgement], failing: Sequence[str], all_ran: bool) -> list[str]:
    """Return the reasons for which the run fails."""
    known = explained()
    caught = [each for each in judgements if each.outcome == CAUGHT and each.test not in failing]
    found = [f"{test} fails without a mistake too" for test in failing]
    for each in judgements:
        if each.outcome != CAUGHT and each.mutant.name not in known:
            place = f"{each.mutant.name} ({each.mutant.file})"
            found.append(f"{place}: {each.outcome}, and {DOCUMENT.name} does not say why")
        if each.outcome == CAUGHT and each.mutant.name in known:
            found.append(f"{DOCUMENT.name} calls a survivor what is caught: {each.mutant.name}")
    if all_ran and len(caught) < ENOUGH * len(judgements):
        found.append(f"{len(caught)} of {len(judgements)} are caught, expected {ENOUGH:.0%}")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the mutants whose names a regular expression finds, and return the exit code."""
    parser = argparse.ArgumentParser(prog="mutants.run", description="Run mutants against the tests.")
    parser.add_argument("names", nargs="?", default="", help="regular expression: which mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    args = parser.parse_args(argv)
    chosen = [(package, mutant) for package, mutant in EVERY if re.search(args.names, mutant.name)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minipar-mutants-") as folder:
        judgements = run(chosen, args.jobs, Path(folder))
        # A test that fails by itself proves nothing.
        tests = [each.test for each in judgements if each.outcome == CAUGHT and "::" in each.test]
        failing = without_mistakes(tests, Path(folder) / "right")
    found = problems(judgements, failing, len(chosen) == len(EVERY))
    caught = sum(each.outcome == CAUGHT for each in judgements)
    minutes = (time.monotonic() - start) / 60
    print(f"{caught} of {len(judgements)} mutants caught, by {len(set(tests))} tests, in {minutes:.1f} minutes")
    print("\n".join(str(each) for each in judgements if each.outcome != CAUGHT))
    print("\n".join(found), file=sys.stderr, end="\n" * bool(found))
    return 1 if found or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
