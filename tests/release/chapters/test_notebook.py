"""The ranks of a notebook start once, however often the first cell runs, and end with the kernel, however it ends."""

import json
import os
import sys
from pathlib import Path

import pytest
from launcher import OPEN_MPI, ROOT

pytest.importorskip("ipyparallel")

from IPython.core.error import UsageError
from kernels import Kernel, wait_for

from chapters.support import notebook

BIN = str(Path(sys.executable).parent)
NOT_ACTIVATED = os.pathsep.join(path for path in os.environ["PATH"].split(os.pathsep) if path != BIN)
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.py"))


def notebook_cells(chapter):
    """List the cells that are only in a chapter's notebook."""
    cells = json.loads(chapter.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if "active-ipynb" in cell["metadata"].get("tags", ())]


FIRST_CELL = notebook_cells(CHAPTERS[0])[0]
RANKS = 2
START = FIRST_CELL.replace("start(8)", f"start({RANKS})")
# All ranks but the last wait for it: a collective that never ends.
COLLECTIVE = """from pathlib import Path
from minipar.comm import world
comm = world()
Path(f"waits{comm.rank}").touch()
if comm.rank < comm.size - 1:
    comm.barrier()
"""
ENDED = 20.0  # seconds after which nothing is left


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that starts a kernel in an environment that is not activated."""
    kernels = []

    def start_kernel(path=NOT_ACTIVATED):
        environment = OPEN_MPI | {"PYTHONPATH": str(ROOT), "PATH": path}
        kernels.append(Kernel(tmp_path_factory.mktemp("notebook"), environment))
        return kernels[-1]

    yield start_kernel
    for kernel in kernels:
        kernel.close()


@pytest.fixture(scope="module")
def started(start):
    """The first cell has been run, and all ranks answer. The tests that share this kernel leave them so."""
    kernel = start()
    before = kernel.processes()
    seen = []
    said = kernel.run(START, on_output=lambda: seen.append(kernel.processes() - before))
    assert len(kernel.processes()) > RANKS, said
    assert str(RANKS) in said and seen[0] == set(), "it says so before it starts a process"
    return kernel


def collective(kernel):
    """Send a collective that never ends, and return when the ranks are in it."""
    kernel.send(COLLECTIVE)
    files = [kernel.folder / f"waits{rank}" for rank in range(RANKS)]
    wait_for(lambda: all(file.exists() for file in files), 60, "the ranks run the cell")


def all_ranks_answer(kernel):
    """Run a cell until each rank prints. ipyparallel skips it on a rank that has not yet ended an interrupted cell."""
    cell = "from mpi4py import MPI\nprint('one of', MPI.COMM_WORLD.size)"
    wait_for(lambda: kernel.run(cell).count(f"one of {RANKS}") == RANKS, 20, "an answer of each rank")


def test_every_chapter_starts_its_ranks_with_the_same_cell():
    for chapter in CHAPTERS:
        first, *others = notebook_cells(chapter)
        assert first == FIRST_CELL and first.endswith("\ncluster = start(8)"), chapter.stem
        assert not any("notebook import" in cell or "ipyparallel" in cell for cell in others), chapter.stem


def test_the_first_cell_again_starts_nothing_on_the_ranks(started):
    processes = started.processes()
    for _ in range(2):
        said = started.run(START)
        assert started.processes() == processes
        assert said.count("\n") == 1 and "restart the kernel" in said
    all_ranks_answer(started)


def test_a_program_that_a_cell_starts_is_the_environments(started):
    said = started.run("import shutil\nprint(shutil.which('mpirun'))")
    assert said.count(f"{BIN}/mpirun") == RANKS


def test_an_interrupted_collective_leaves_the_ranks_usable(started):
    processes = started.processes()
    collective(started)
    started.manager.interrupt_kernel()
    all_ranks_answer(started)
    assert started.processes() == processes


def test_the_last_cells_stop_the_ranks(started):
    """The notebook can be run again from its first cell."""
    *_, switch_autopx_off, stop = notebook_cells(CHAPTERS[0])
    started.run(switch_autopx_off)
    started.run(stop)
    wait_for(lambda: started.processes() == {started.pid}, ENDED, f"the end of {started.commands()}")
    started.run(START)
    all_ranks_answer(started)


def test_nothing_is_left_of_a_killed_kernel(start):
    kernel = start()
    kernel.run(START)
    collective(kernel)
    memory = kernel.shared_memory()
    kernel.manager.provisioner.process.kill()
    wait_for(lambda: not kernel.processes(), ENDED, f"the end of {kernel.commands()}")
    assert [file for file in memory if file.exists()] == []


def test_nothing_is_left_of_a_kernel_killed_at_its_start(start):
    kernel = start()
    kernel.send(START)
    wait_for(lambda: "mpiexec" in kernel.commands(), 60, "mpiexec")
    kernel.manager.provisioner.process.kill()
    wait_for(lambda: not kernel.processes(), 2 * ENDED, f"the end of {kernel.commands()}")


def test_nothing_is_left_of_a_restarted_kernel(start):
    kernel = start()
    kernel.run(START)
    collective(kernel)
    kernel.manager.restart_kernel()
    wait_for(lambda: kernel.processes() == {kernel.pid}, ENDED, f"the end of {kernel.commands()}")
    kernel.client.wait_for_ready(timeout=60)
    kernel.run(START)
    all_ranks_answer(kernel)


def test_nothing_is_left_of_a_start_that_is_interrupted(start):
    kernel = start()
    kernel.send(START)
    wait_for(lambda: "mpiexec" in kernel.commands(), 60, "mpiexec")
    kernel.manager.interrupt_kernel()
    wait_for(lambda: kernel.processes() == {kernel.pid}, ENDED, f"the end of {kernel.commands()}")
    kernel.run(START)
    all_ranks_answer(kernel)


def test_nothing_is_left_of_a_killed_controller(start):
    kernel = start()
    kernel.run(START)
    kernel.run("%autopx")
    kernel.run("import os, signal\nos.kill(cluster.controller.pid, signal.SIGKILL)")
    wait_for(lambda: kernel.processes() == {kernel.pid}, ENDED, f"the end of {kernel.commands()}")


def test_an_mpiexec_that_fails_is_shown_with_its_reason(start, tmp_path):
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho no slots are left >&2\nexit 3\n")
    mpiexec.chmod(0o755)
    kernel = start(path=f"{tmp_path}:{BIN}:{NOT_ACTIVATED}")
    said = kernel.run(START)
    assert "UsageError" in said and "no slots are left" in said and "Traceback" not in said
    assert kernel.processes() == {kernel.pid}


def test_a_missing_mpiexec_is_a_line_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="pip install mpich"):
        notebook.start(RANKS)


def test_a_script_that_starts_ranks_is_told_of_mpirun():
    with pytest.raises(UsageError, match=f"mpirun -n {RANKS} python"):
        notebook.start(RANKS)
