"""A rank's messages to MPICH's mpirun, over the connection that MPI uses later: the texts of its protocol, PMI-1.

mpirun has a proxy on each host, which started the ranks there and answers them.
"""

import os
import stat
import time

OUTPUT_SECONDS = 0.3  # from the last line printed to the end of the job: mpirun drops what is still in its pipes
END_SECONDS = 5.0  # for mpirun to end this process
LONGEST_ANSWER = 1 << 16  # bytes


def connected() -> bool:
    """Return True if MPICH's mpirun started this process.

    A process that a rank has started is not connected.
    """
    if "HYDI_CONTROL_FD" not in os.environ:
        return False
    try:
        return stat.S_ISSOCK(os.fstat(int(os.environ["PMI_FD"])).st_mode)
    except (KeyError, ValueError, OSError):
        return False


def ask(command: str) -> str:
    """Return the answer to one command. Only before MPI starts."""
    connection = int(os.environ["PMI_FD"])
    os.write(connection, f"{command}\n".encode())
    return os.read(connection, LONGEST_ANSWER).decode()


def value_of(key: str) -> str:
    """Return what mpirun has stored for this job under a key; "" if there is nothing."""
    store = ask("cmd=get_my_kvsname").partition("kvsname=")[2].strip()
    return ask(f"cmd=get kvsname={store} key={key}").partition("value=")[2].strip()


def meet() -> None:
    """Wait until every rank of the job has come here. Only where all are on one host."""
    ask("cmd=barrier_in")


def end_job(code: int) -> None:
    """End every rank, this one too, and make mpirun exit with `code`.

    Return if there is no MPICH's mpirun.
    """
    if not connected():
        return
    time.sleep(OUTPUT_SECONDS)
    try:
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    except OSError:  # mpirun has ended
        return
    time.sleep(END_SECONDS)
