"""Claims about the launcher of a process: which it is, how many ranks it started, and whether MPI is its own."""

import importlib
import os
from types import SimpleNamespace

import pytest

from minipar.errors import UsageError
from minipar.robust_start.launchers import LAUNCHERS, check_count, check_mpi_library, prints_error, started_ranks

OPEN_SIZE, OPEN_RANK = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"


@pytest.fixture
def started(monkeypatch):
    """Start with these variables alone."""

    def start(**variables):
        names = [name for row in LAUNCHERS for name in row[1:]]
        for name in [*names, "PMI_FD", "SLURM_STEP_ID"]:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return start


STARTED = [
    ({}, (1, "mpirun", "")),
    ({"PMI_SIZE": "4"}, (4, "mpirun", "PMI_SIZE")),
    ({OPEN_SIZE: "3"}, (3, "mpirun", OPEN_SIZE)),
    ({"PMIX_SIZE": "2"}, (2, "mpirun", "PMIX_SIZE")),
    ({"WORLD_SIZE": "8"}, (8, "torchrun", "WORLD_SIZE")),
    ({"SLURM_STEP_NUM_TASKS": "6"}, (6, "srun", "SLURM_STEP_NUM_TASKS")),
    ({"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "6"}, (1, "mpirun", "PMI_SIZE")),
    ({"PMI_SIZE": "2", OPEN_SIZE: "5"}, (5, "mpirun", OPEN_SIZE)),
    ({"PMI_SIZE": ""}, (1, "mpirun", "")),
]


@pytest.mark.parametrize(("variables", "expected"), STARTED)
def test_a_launchers_variables_say_how_many_ranks(variables, expected, started):
    started(**variables)
    assert started_ranks() == expected


def test_a_size_that_is_no_number_is_named(started):
    started(WORLD_SIZE="two")
    line = "^WORLD_SIZE=two: expected a number of ranks; unset it to run one process$"
    with pytest.raises(UsageError, match=line):
        started_ranks()


def test_mpi_has_the_launchers_number_of_ranks(started):
    for count, size in ((1, 1), (1, 5), (4, 4)):
        started(PMI_SIZE=str(count))
        check_count(size)
    started()
    check_count(2)


@pytest.mark.parametrize(
    ("variable", "launcher", "cause"),
    [
        ("PMI_SIZE", "mpirun", "mpirun and mpi4py's library belong to different MPIs"),
        (
            "WORLD_SIZE",
            "torchrun",
            "torchrun does not start MPI ranks; start with mpirun -n 2 python ..., or unset WORLD_SIZE to run one "
            "process",
        ),
    ],
)
def test_another_number_of_ranks_is_named_with_its_cause(variable, launcher, cause, started):
    started(**{variable: "2"})
    with pytest.raises(UsageError) as caught:
        check_count(1)
    assert str(caught.value) == f"{launcher} started 2 ranks, but the MPI library sees 1: {cause}"


PRINTS = [
    ({}, True),
    ({"PMI_SIZE": "3", "PMI_RANK": "0"}, True),
    ({"PMI_SIZE": "3", "PMI_RANK": "1"}, False),
    ({"PMI_SIZE": "3", "PMI_RANK": "2"}, False),
    ({"PMI_SIZE": "3", "PMI_RANK": "3"}, True),  # not a rank of this job
    ({"PMI_SIZE": "3"}, True),
    ({"PMI_RANK": "2"}, True),
    ({"PMI_SIZE": "three", "PMI_RANK": "1"}, True),
    ({OPEN_SIZE: "2", OPEN_RANK: "1"}, False),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, False),
]


@pytest.mark.parametrize(("variables", "prints"), PRINTS)
def test_rank_0_alone_prints_an_error(variables, prints, started):
    started(**variables)
    assert prints_error() is prints


# ---- the library of mpi4py -------------------------------------------------------------------------------------------

VARIABLE = "set the environment variable MPI4PY_MPIABI"
MPICH_LOADED = (
    f"mpirun is Open MPI's, but mpi4py loads MPICH: {VARIABLE}=openmpi, or install Open MPI in an environment "
)
MPICH_LOADED += "of its own"
OPEN_LOADED = f"mpirun is MPICH's, but mpi4py loads Open MPI: {VARIABLE}=mpich, or start with Open MPI's mpirun"
LIBRARIES = [
    ("mpich", {}, ""),
    ("mpich", {"PMI_SIZE": "2"}, ""),
    ("mpich", {OPEN_SIZE: "2"}, MPICH_LOADED),
    ("mpich", {OPEN_SIZE: "2", "PMI_SIZE": "2"}, ""),
    ("openmpi", {}, ""),
    ("openmpi", {OPEN_SIZE: "2"}, ""),
    ("openmpi", {"PMI_SIZE": "2"}, OPEN_LOADED),
    ("openmpi", {OPEN_SIZE: "2", "PMI_SIZE": "2"}, ""),
    ("openmpi", {"PMI_SIZE": "2", "SLURM_STEP_ID": "0"}, ""),  # srun has such variables, too
    ("another", {"PMI_SIZE": "2"}, ""),
    ("another", {OPEN_SIZE: "2"}, ""),
]


@pytest.mark.parametrize(("library", "variables", "line"), LIBRARIES)
def test_a_library_of_another_mpi_is_refused_with_a_remedy(library, variables, line, started, monkeypatch):
    started(**variables)
    found = SimpleNamespace(_registry={"mpi4py.MPI": 1}, _get_mpiabi=lambda: library)
    monkeypatch.setattr(importlib, "import_module", lambda name: found)
    if line:
        with pytest.raises(UsageError) as caught:
            check_mpi_library()
        assert str(caught.value) == line
    else:
        check_mpi_library()


def test_a_build_for_one_library_has_no_choice(started, monkeypatch):
    """It registers none, or lacks the list, or cannot be read: nothing is known, and nothing refused."""

    def asked():
        raise AssertionError("a build for one library was asked for its choice")

    started(PMI_SIZE="2")
    for found in (SimpleNamespace(_registry={}, _get_mpiabi=asked), SimpleNamespace()):
        monkeypatch.setattr(importlib, "import_module", lambda name, found=found: found)
        check_mpi_library()


@pytest.mark.parametrize("value", ["x", "987654"])
def test_variables_without_their_mpirun_are_named(value, started):
    started(PMI_FD=value)
    why = "mpirun's variables are set, but mpirun has not started this process; unset PMI_FD, PMI_RANK and PMI_SIZE"
    with pytest.raises(UsageError) as caught:
        check_mpi_library()
    assert str(caught.value) == f"PMI_FD={value}: {why}"


def test_an_open_connection_is_mpiruns(started, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    reader, writer = os.pipe()
    try:
        started(PMI_FD=str(reader))
        check_mpi_library()
    finally:
        os.close(reader)
        os.close(writer)
