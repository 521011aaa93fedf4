"""A job with a /tmp and a /dev/shm of its own, so that what it leaves behind is known exactly.

As a program, inside a namespace of mounts: hide both directories behind empty ones, run a command, list what has
changed. No root is needed where the kernel lets users have their own namespaces.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from launcher import Result, mpirun_is_open_mpi, run_mpi

SETTLE_SECONDS = 15.0  # for mpirun's processes to end and to remove their own files
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
OWN = [Path("/tmp"), Path("/dev/shm")]


@cache
def why_not() -> str | None:
    """Return what keeps this machine from having such jobs; None if nothing does."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "namespaces need Linux and unshare"
    if mpirun_is_open_mpi():
        return "these are the files of MPICH and its mpirun"
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, timeout=30)
    return None if tried.returncode == 0 else f"no mounts of one's own here: {tried.stderr.decode().strip()}"


def run_alone(
    folder: Path,
    n: int,
    argv_or_script: list[str] | str,
    shared: str = "size=1g",
    env: dict[str, str] | None = None,
    first: str = "",
) -> tuple[Result, list[str]]:
    """Run a program on n ranks with a /dev/shm of these mount options. Return the result, and the files left in both.

    `first` is a shell command to run before, in the directories that the job gets. A file of it that is gone is listed.
    """
    before = [*NAMESPACE, sys.executable, __file__, str(folder), shared, first]
    result = run_mpi(n, argv_or_script, env=env, before=before)
    return result, (folder / "left").read_text().splitlines()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, cwd="/")


def _mount(shared: str) -> None:
    """Mount both. The folders in /tmp stay at their places: the tests' and perhaps the tree's are among them.

    Folders of other programs may end meanwhile.
    """
    program = 'cd /tmp && mount -t tmpfs tmpfs /tmp && for folder in */; do mkdir "/tmp/$folder"; '
    program += 'mount --no-canonicalize --rbind "./$folder" "/tmp/$folder" 2> /dev/null; done; true'
    _do("mount", "--make-rprivate", "/")
    _do("sh", "-c", program)
    _do("mount", "-t", "tmpfs", "-o", shared, "tmpfs", "/dev/shm")


def _files() -> set[str]:
    return {str(path) for folder in OWN for path in folder.iterdir()}


def _main(folder: Path, shared: str, first: str, command: list[str]) -> int:
    _mount(shared)
    _do("sh", "-c", first)
    before = _files()
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    deadline = time.monotonic() + SETTLE_SECONDS
    while _files() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    (folder / "left").write_text("".join(f"{file}\n" for file in sorted(_files() ^ before)))
    return code


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
