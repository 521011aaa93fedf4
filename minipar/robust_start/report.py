"""A file in the temporary directory, where every user may have put something under its name before."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def write_report(path: Path, text: str) -> None:
    """Write a file into a directory that only this user can enter.

    OSError if it is somebody else's, or no directory.

    In a directory that is everybody's, a pipe under the file's name would hold this rank for ever.
    """
    folder = path.parent
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory of this user", str(folder))
    folder.chmod(0o700)
    path.unlink(missing_ok=True)  # an earlier report
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
