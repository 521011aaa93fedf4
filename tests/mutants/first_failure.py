"""A plugin for pytest: it writes the name of the first test that fails to the file that MINIPAR_FIRST_FAILURE names."""

import os
from pathlib import Path

FILE = "MINIPAR_FIRST_FAILURE"


def pytest_runtest_logreport(report):
    """Note a test that has failed, in its setup too, unless an earlier one is noted."""
    file = Path(os.environ[FILE])
    if report.failed and not file.exists():
        file.write_text(report.nodeid, encoding="utf-8")
