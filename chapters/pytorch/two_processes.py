"""The start of every twin: processes of torch.distributed over gloo on this machine; and a checksum of arrays."""

import os
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

LIMIT = 300  # seconds, for one message and for the whole program


def start(main, processes=2):
    """Run main(rank) once in each process. The first error of one, or the end of the time, ends all of them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (main, processes, f"{folder}/store")
        running = start_processes(_run, arguments, processes, join=False, start_method="spawn")
        deadline = time.monotonic() + LIMIT
        while not running.join(timeout=1):
            if time.monotonic() > deadline:
                for process in running.processes:
                    process.kill()
                raise SystemExit(f"{processes} processes did not end in {LIMIT} s")


def _run(rank, main, processes, store):
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, processes)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=processes, timeout=timedelta(seconds=LIMIT))
    main(rank)
    dist.barrier()  # a process that ended earlier would close the connections of the others
    # gloo's threads can abort a process that has computed everything, while the interpreter ends: end without it.
    sys.stdout.flush()
    os._exit(0)


def checksum(tensor):
    """Return a number that changes if a value changes, or its place: the dot product with cos 0, cos 1, cos 2, ..."""
    values = tensor.detach().double().flatten()
    return float(values @ torch.arange(len(values)).double().cos())
