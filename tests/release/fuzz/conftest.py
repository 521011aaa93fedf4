"""The fixture with which a target is fuzzed, and the table of what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fuzz.harness import CASES, SEED, Count, fuzz

COUNTS = "fuzzed"


@pytest.fixture
def fuzzed(record_property) -> Iterator[Callable[..., Count]]:
    """`fuzz`, whose counts are in the table at the end."""

    def run(*args, **kwargs) -> Count:
        count = fuzz(*args, **kwargs)
        record_property(COUNTS, str(count))
        return count

    yield run


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        f"{value}  {report.nodeid.rpartition('::')[2]}"
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == COUNTS
    ]
    if rows:
        terminalreporter.section(f"fuzzing: {CASES} cases with SEED={SEED}")
        terminalreporter.write_line("\n".join(rows))
