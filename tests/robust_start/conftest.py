"""What tests of a process's end share: what the process and its job would do, in place of doing it."""

import os
import time

import pytest
from process_end import Ended

from minipar.robust_start import exits, mpirun


@pytest.fixture
def ends(monkeypatch):
    """Note what a process does at its end, in order: ("sleep", seconds), ("job", code), ("exit", code)."""
    events = []

    def end(status):
        events.append(("exit", status))
        raise Ended

    monkeypatch.setattr(exits, "_exit", end)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(mpirun, "end_job", lambda code: events.append(("job", code)))
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append(("sleep", seconds)))
    return events
