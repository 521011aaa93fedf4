"""The process of a rank: BLAS has one thread, and freed memory is kept for the next arrays."""

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

from threadpoolctl import ThreadpoolController

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
# To find the libraries takes milliseconds, to set a limit microseconds.
_thread_pools = cache(ThreadpoolController)


def one_blas_thread() -> AbstractContextManager[object]:
    """Limit BLAS to one thread from now on. As a context manager, restore the limit at the end.

    Ranks are the parallelism: 8 ranks that each start a BLAS thread per core slow one another down
    tenfold. OPENBLAS_NUM_THREADS or MKL_NUM_THREADS, set by the user, has priority.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return nullcontext()
    return _thread_pools().limit(limits=1, user_api="blas")


def prepare_process() -> None:
    """Set this process up as a rank: BLAS has one thread, and malloc keeps freed arrays for the next ones.

    `launch`, `main` and `world` call it; importing minipar changes nothing. By default glibc
    returns large arrays to the system, and each step gets its activations as new pages, which the
    kernel fills with zeros. The price is that a process keeps its peak. NB: PyTorch's caching
    allocator does the same on a GPU.
    """
    one_blas_thread()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):  # macOS, musl, Windows: there is none
        return
    mallopt(M_TRIM_THRESHOLD, -1)  # -1: never
    # Before 2.35 glibc refuses (0) more than half a thread's heap, 32 MiB. Larger arrays are then
    # mapped as before.
    if not mallopt(M_MMAP_THRESHOLD, 2**30):
        mallopt(M_MMAP_THRESHOLD, 2**25)
