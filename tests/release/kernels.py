"""A Jupyter kernel, as a notebook has one, and all processes that come from it.

A mark in their environment tells them: MPI and ipyparallel put theirs into sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from jupyter_client import KernelManager

MARK = "MINIPAR_TEST_KERNEL"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def wait_for(event: Callable[[], bool], timeout: float, what: str) -> None:
    """Return as soon as `event()` is true. AssertionError if it is not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not event():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.05)


class Kernel:
    """A running kernel. `close` kills all that is left of it, in whatever session or process group."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"IPYTHONDIR": str(folder / "ipython")} | environment | {MARK: self.mark}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        """The kernel's own process; it changes with a restart."""
        return self.manager.provisioner.process.pid

    def send(self, cell: str) -> None:
        """Run a cell without waiting for it. The cells that follow run even if it fails."""
        self.client.execute(cell, stop_on_error=False)

    def run(self, cell: str, timeout: float = 60.0, on_output: Callable[[], None] = lambda: None) -> str:
        """Run a cell and return what it prints, errors too. `on_output` is called when an output arrives."""
        texts = []

        def keep(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                text = content.get("text") or content.get("data", {}).get("text/plain")
                texts.append(text or "\n".join(content["traceback"]))
                on_output()

        try:
            self.client.execute_interactive(cell, timeout=timeout, output_hook=keep, allow_stdin=False)
        except TimeoutError:
            raise AssertionError(f"not within {timeout:g} s: {cell}\n{''.join(texts)}") from None
        return COLOURS.sub("", "".join(texts))

    def processes(self) -> set[int]:
        """Return the processes that run: the kernel's and all that were started from it, and by them."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    def commands(self) -> str:
        """Return the commands of these processes, a line for each."""
        lines = []
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(psutil.Process(pid).cmdline()))
        return "\n".join(lines)

    def shared_memory(self) -> set[Path]:
        """Return the files of shared memory of MPICH that these processes have mapped."""
        files = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                files |= {Path(line.split()[-1]) for line in lines if "/mpich_shm" in line}
        return {file for file in files if file.exists()}

    def close(self) -> None:
        """Kill what is left, and remove the names of its shared memory."""
        self.client.stop_channels()
        memory = self.shared_memory()
        for pid in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for file in memory:
            file.unlink(missing_ok=True)
        self.manager.cleanup_resources()
