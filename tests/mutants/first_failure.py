"""A plugin for pytest: it writes the name of the first test that fails to the file that MINIPAR_FIRST_FAILURE names.

A file that MINIPAR_DEADLINES names has the seconds after which a test counts as failed, because it has come to hang.
"""

import json
import os
import signal
import threading
from pathlib import Path

import psutil

FILE = "MINIPAR_FIRST_FAILURE"
DEADLINES = "MINIPAR_DEADLINES"
HANGS = " hangs"  # follows the name of a test that has not failed by its deadline
PATIENCE = 10.0  # seconds in which an interrupted run ends the jobs that it has started
TIMERS: dict[str, threading.Timer] = {}


def note(nodeid):
    """Note a test that has failed, unless an earlier one is noted."""
    file = Path(os.environ[FILE])
    if not file.exists():
        file.write_text(nodeid, encoding="utf-8")


def pytest_runtest_logreport(report):
    """Note a test that has failed, in its setup too."""
    if report.failed:
        note(report.nodeid)


def pytest_runtest_logstart(nodeid, location):
    """Start a test's time, where there is a deadline for it."""
    if DEADLINES in os.environ:
        seconds = json.loads(Path(os.environ[DEADLINES]).read_text(encoding="utf-8")).get(nodeid)
        if seconds:
            start_timer(nodeid, seconds, give_up)


def pytest_runtest_logfinish(nodeid, location):
    """Stop the test's time."""
    timer = TIMERS.pop(nodeid, None)
    if timer:
        timer.cancel()


def start_timer(nodeid, seconds, function):
    TIMERS[nodeid] = threading.Timer(seconds, function, [nodeid])
    TIMERS[nodeid].daemon = True
    TIMERS[nodeid].start()


def give_up(nodeid):
    """Note a test that hangs, and interrupt pytest; what the test has started ends then, or is killed."""
    note(nodeid + HANGS)
    os.kill(os.getpid(), signal.SIGINT)
    start_timer(nodeid, PATIENCE, end_at_once)


def end_at_once(nodeid):
    """Kill what a hanging test has started, and this process."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)
