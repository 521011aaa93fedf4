"""Collectives written from isend and irecv, over MPI and over threads, with counted traffic, clocks and a trace.

One call goes through these files; read them in this order:

    communicator   the operations: make arrays flat, choose an algorithm, run it
    algorithms     each algorithm of an operation as a generator of messages
    work           drives the generators, blocking or asynchronous
    transport      isend and irecv, which mpi and threads implement, and the count of what is sent

Around it: mesh (a communicator for each axis), traffic (closed forms), clock, trace and its file,
chrome_trace, and launch.
"""

import lazy_loader

# The names are in __init__.pyi, which editors and type checkers read, too. Each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
