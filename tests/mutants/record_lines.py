"""A plugin for pytest: it writes which lines of minipar and visualize each test executes, and how long the test takes.

MINIPAR_LINES names the folder to write to. Processes that a test starts, such as ranks under mpirun, are measured too:
coverage.py starts in each process that has COVERAGE_PROCESS_START, and takes the test's name from the environment.
"""

import json
import os
from pathlib import Path

import coverage

FOLDER = "MINIPAR_LINES"
TEST = "MINIPAR_TEST"
SETTINGS = """[run]
core = ctrace
parallel = true
data_file = {folder}/.coverage
source = {root}/minipar,{root}/visualize
context = ${{MINIPAR_TEST}}
disable_warnings = no-data-collected,module-not-measured,module-not-imported
"""
SECONDS: dict[str, float] = {}
MEASURED: list[coverage.Coverage] = []


def pytest_configure(config):
    """Measure from before the tests are imported. The context of an import has no name."""
    folder = Path(os.environ[FOLDER])
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(folder=folder, root=config.rootpath), encoding="utf-8")
    os.environ[TEST] = ""
    MEASURED.append(coverage.Coverage(config_file=str(settings)))
    MEASURED[0].start()
    os.environ["COVERAGE_PROCESS_START"] = str(settings)


def pytest_runtest_logstart(nodeid, location):
    os.environ[TEST] = nodeid
    MEASURED[0].switch_context(nodeid)


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration


def pytest_unconfigure(config):
    MEASURED[0].stop()
    MEASURED[0].save()
    (Path(os.environ[FOLDER]) / "seconds.json").write_text(json.dumps(SECONDS), encoding="utf-8")
