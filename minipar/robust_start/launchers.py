"""The launcher that started this process, and the check that it belongs to the MPI library that mpi4py loads."""

import importlib
import os
from typing import Any

from minipar.errors import UsageError

# Launchers, and the variables in which each process finds the number of processes and its own
# number.
LAUNCHERS = (
    ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("mpirun", "PMIX_SIZE", "PMIX_RANK"),
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def started_ranks() -> tuple[int, str, str]:
    """Return the number of ranks that a launcher started, the launcher and the variable; (1, "mpirun", "") for none."""
    rows = [row for row in LAUNCHERS if os.environ.get(row[1])]
    rows = [row for row in rows if row[0] == "mpirun"] or rows  # a job of one rank inside an allocation of many is one
    for _, variable, _ in rows:
        if not (value := os.environ[variable]).isdecimal():
            raise UsageError(f"{variable}={value}: expected a number of ranks; unset it to run one process")
    counts = [(int(os.environ[variable]), launcher, variable) for launcher, variable, _ in rows]
    return max(counts, default=(1, "mpirun", ""))


def check_count(size: int) -> None:
    """Raise UsageError if MPI has another number of ranks than the launcher has started."""
    count, launcher, variable = started_ranks()
    if count in (1, size):
        return
    cause = "mpirun and mpi4py's library belong to different MPIs"
    if launcher != "mpirun":
        remedy = f"start with mpirun -n {count} python ..., or unset {variable} to run one process"
        cause = f"{launcher} does not start MPI ranks; {remedy}"
    raise UsageError(f"{launcher} started {count} ranks, but the MPI library sees {size}: {cause}")


def check_mpi_library() -> None:
    """Raise UsageError if mpirun and mpi4py's library differ.

    MPI itself would abort, and name no cause or remedy.
    """
    descriptor = os.environ.get("PMI_FD")
    try:
        if descriptor is not None:
            os.fstat(int(descriptor))
    except (ValueError, OSError):
        why = "mpirun's variables are set, but mpirun has not started this process"
        raise UsageError(f"PMI_FD={descriptor}: {why}; unset PMI_FD, PMI_RANK and PMI_SIZE") from None
    hydra, open_mpi = "PMI_SIZE" in os.environ, "OMPI_COMM_WORLD_SIZE" in os.environ
    try:
        # mpi4py's wheels choose between libraries and register them here. A build for one library
        # has no choice.
        _mpiabi: Any = importlib.import_module("mpi4py._mpiabi")
        library = _mpiabi._get_mpiabi() if "mpi4py.MPI" in _mpiabi._registry else None
    except (ImportError, AttributeError, RuntimeError, OSError):
        return  # which library `from mpi4py import MPI` loads is not known
    variable = "set the environment variable MPI4PY_MPIABI"
    if library == "mpich" and open_mpi and not hydra:
        remedy = f"{variable}=openmpi, or install Open MPI in an environment of its own"
        raise UsageError(f"mpirun is Open MPI's, but mpi4py loads MPICH: {remedy}")
    if library == "openmpi" and hydra and not open_mpi and "SLURM_STEP_ID" not in os.environ:
        remedy = f"{variable}=mpich, or start with Open MPI's mpirun"
        raise UsageError(f"mpirun is MPICH's, but mpi4py loads Open MPI: {remedy}")


def prints_error() -> bool:
    """Return False on the ranks that leave the error to rank 0, before MPI has started."""
    for _, variable, rank in LAUNCHERS:
        size, number = os.environ.get(variable, ""), os.environ.get(rank, "")
        if size.isdecimal() and number.isdecimal():
            return not 0 < int(number) < int(size)
    return True
