"""The lock of a `--save` directory: one job at a time reads its newest checkpoint, saves there, and cleans up.

The operating system holds the lock while the process of rank 0 lives, and takes it back however
that process ends. The file DIR/minipar.lock is what is locked, and says by whom. A job that was
killed leaves the file, which locks nothing.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from minipar.cli import writing
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, print_line, printable
from minipar.train.checkpoint import agreeing, refuse_inside_checkpoint

LOCK = "minipar.lock"
LONGEST_HOLDER = 200  # characters that are read of what the file says


@contextmanager
def saving_alone(comm: Communicator, directory: str | None) -> Iterator[None]:
    """Keep all other jobs out of `--save DIR` inside the block.

    All ranks call it. UsageError on every rank if one is there. DIR is made if it is missing, and removed
    if it is still empty at the end: a job that is refused leaves nothing.
    """
    with ExitStack() as until_the_end:
        with agreeing(comm, f"--save {directory}"):
            if directory is not None and comm.rank == 0:
                refuse_inside_checkpoint(directory)
                with writing(f"--save {directory}"):
                    until_the_end.enter_context(_made(Path(directory)))
                    until_the_end.enter_context(_locked(Path(directory), f"--save {directory}"))
        yield


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Make a directory and its parents. After the block, remove those of them that are empty."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def _locked(directory: Path, flag: str) -> Iterator[None]:
    """Hold the lock of a directory inside the block.

    UsageError, which names the holder, if another process has it.
    """
    path = directory / LOCK
    with _lock(path, flag) as file:  # to close the file is to release the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def _lock(path: Path, flag: str) -> TextIO:
    """Open a file, which is made if it is missing, and lock it.

    UsageError if it is locked, without waiting.
    """
    while True:
        # A link is not followed, and a pipe is refused without waiting for its other end.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        file = open(descriptor, "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(LONGEST_HOLDER).strip()
            file.close()
            then = "wait until it has ended, end it, or save to another directory"
            raise UsageError(f"{flag}: another job saves there ({path}: {holder}); {then}") from None
        except OSError as error:  # some network file systems have no locks
            unlocked = f"{flag}: its file system cannot lock {LOCK} ({error.strerror})"
            print_line(f"minipar: note: {printable(unlocked)}; start no second job into it")
            return file
        if os.fstat(descriptor).st_nlink > 0:
            return file
        file.close()  # the job before has removed the file between the two calls
