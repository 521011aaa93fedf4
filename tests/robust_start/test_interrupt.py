"""Claims about Ctrl-C while a job starts: one line, exit code 130, and no traceback."""

import ast
import signal
import time

import pytest
from launcher import ROOT, interrupt_mpi, mpirun_is_open_mpi

from minipar.comm.launch import launch
from minipar.robust_start import interrupt

IMPORTS = """
import minipar.robust_start.first_import
import os, pathlib, time
pathlib.Path({folder!r}, "started" + os.environ["PMI_RANK"]).touch()
time.sleep(60)
"""
MEETS = """
import os, pathlib, signal, time
if os.environ["PMI_RANK"] == "2":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
from minipar.comm import main
from minipar.robust_start import mpirun
meet = mpirun.meet
def note():
    pathlib.Path({folder!r}, "started" + os.environ["PMI_RANK"]).touch()
    meet()
mpirun.meet = note
main(print)
"""


@pytest.mark.skipif(mpirun_is_open_mpi(), reason="Open MPI's mpirun kills the ranks itself")
@pytest.mark.parametrize(("program", "ready"), [(IMPORTS, 3), (MEETS, 2)], ids=["imports", "meets"])
def test_ctrl_c_while_a_job_starts_is_one_line(program, ready, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(program.format(folder=str(tmp_path)))
    begin = time.monotonic()
    result = interrupt_mpi(3, [str(script)], lambda: len(list(tmp_path.glob("started*"))) == ready)
    assert (result.returncode, result.stderr) == (130, "minipar: interrupted\n")
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("program", ["train", "bench"])
def test_the_handler_is_the_first_import_of_a_program(program):
    tree = ast.parse((ROOT / "minipar" / program / "__main__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = [node for node in imports if getattr(node, "module", None) != "__future__"][0]
    assert ast.unparse(first) == "import minipar.robust_start.first_import"


def test_ctrl_c_is_an_exception_again_when_mpi_runs():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt.install()
        assert signal.getsignal(signal.SIGINT) is interrupt.end_at_once
        with pytest.raises(SystemExit) as leaving:
            launch(lambda comm: signal.raise_signal(signal.SIGINT))
        assert leaving.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_programs_own_handler_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        interrupt.install()
        assert launch(lambda comm: signal.getsignal(signal.SIGINT)) is handler
    finally:
        signal.signal(signal.SIGINT, before)
