"""Two hosts on one machine: namespaces with a network, processes, shared memory and a name of their own, and a cable.

As a program, inside `NAMESPACES`: lay the cable, run a command on host a, note what went over the cable. Everything is
gone with the first process of the namespaces. No root is needed where the kernel lets users have their own namespaces.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HOSTS = ("10.77.0.1", "10.77.0.2")  # the first is where mpirun runs
PREFIX, CABLE = 24, "veth0"
SETTLE_SECONDS = 5.0
KINDS = ("--net", "--uts", "--ipc", "--mount")  # what each host has of its own, beside its processes
NAMESPACES = ("unshare", "--user", "--map-root-user", *KINDS, "--pid", "--fork", "--kill-child", "--mount-proc")
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "hostname", "sh")
# What Hydra runs in place of ssh: ENTER [-x] HOST COMMAND...
ENTER = """#!/bin/sh
[ "$1" = -x ] && shift
shift
exec nsenter --target {pid} {kinds} --pid --wd="$PWD" sh -c "$*"
"""


def prefix(folder: Path) -> list[str]:
    """Return what to put before a command for it to run on host a."""
    return [*NAMESPACES, sys.executable, __file__, str(folder)]


def options(folder: Path, per_host: int) -> list[str]:
    """mpirun's: so many ranks on host a, as many on host b, and so on in turn."""
    launcher = ["-launcher", "ssh", "-launcher-exec", str(folder / "enter")]
    return [*launcher, "-hosts", ",".join(HOSTS), "-ppn", str(per_host)]


def on_the_wire(folder: Path) -> dict[str, int]:
    """{"sent": bytes from host a to host b, "received": bytes back}, headers of TCP and of Ethernet included."""
    return json.loads((folder / "wire.json").read_text())


def why_not(folder: Path) -> str | None:
    """Return what keeps this machine from having two hosts; None if nothing does."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"namespaces need Linux and {', '.join(missing or PROGRAMS)}"
    mpirun = Path(sys.executable).parent / "mpirun"
    if "HYDRA" not in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout:
        return f"{mpirun} is not MPICH's Hydra, whose options this needs"
    tried = subprocess.run([*prefix(folder), "true"], capture_output=True, text=True, timeout=30)
    return None if tried.returncode == 0 else f"no two hosts here: {tried.stderr.strip().splitlines()[-1:]}"


def _do(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _wait(what: str, condition) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"two_hosts: {what} did not come within {SETTLE_SECONDS:g} s")
        time.sleep(0.01)


def _main(folder: Path, command: list[str]) -> int:
    own = subprocess.Popen(
        ["unshare", *KINDS, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; exec sleep 600"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert own.stdout is not None
    own.stdout.readline()  # host b stands
    pid = Path(f"/proc/{own.pid}/task/{own.pid}/children").read_text().split()[0]
    other = ("nsenter", "--target", pid, *KINDS)
    _do("ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", pid)
    for name, address, inside in (("host-a", HOSTS[0], ()), ("host-b", HOSTS[1], other)):
        _do(*inside, "hostname", name)
        _do(*inside, "mount", "-t", "sysfs", "sysfs", "/sys")  # UCX looks for the host's network devices there
        _do(*inside, "ip", "address", "add", f"{address}/{PREFIX}", "dev", CABLE)
        for device in ("lo", CABLE):
            _do(*inside, "ip", "link", "set", device, "up")
    for inside in ((), other):
        state = (*inside, "cat", f"/sys/class/net/{CABLE}/operstate")
        _wait(f"{CABLE} of {inside or 'host a'}", lambda state=state: _do(*state).strip() == "up")
    # What only host a has: an empty directory hides it on host b.
    (folder / "of_host_a").mkdir(exist_ok=True)
    _do(*other, "mount", "-t", "tmpfs", "tmpfs", str(folder / "of_host_a"))
    enter = folder / "enter"
    enter.write_text(ENTER.format(pid=pid, kinds=" ".join(KINDS)))
    enter.chmod(0o755)

    counts = {"sent": "tx", "received": "rx"}
    where = {name: Path(f"/sys/class/net/{CABLE}/statistics/{which}_bytes") for name, which in counts.items()}
    before = {name: int(path.read_text()) for name, path in where.items()}
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    wire = {name: int(path.read_text()) - before[name] for name, path in where.items()}
    (folder / "wire.json").write_text(json.dumps(wire))
    own.kill()
    return code


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
