"""Collectives written from isend and irecv, over MPI and over threads, with counted traffic, clocks and a trace.

One call goes through these files; read them in this order:

    communicator   the operations: check the arrays, choose an algorithm, run it
    algorithms     each algorithm of an operation as a generator of messages
    work           drives the generators, blocking or asynchronous
    transport      isend and irecv, the interface, which mpi and threads implement

Around it: mesh (a communicator for each axis), traffic (counts and closed forms), clock, trace,
launch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "algorithms": ["chunk_bounds"],
        "clock": ["CpuClock", "ModelClock", "Network", "Tracer", "WallClock"],
        "communicator": ["ALGORITHMS", "Communicator"],
        "launch": ["main", "world"],
        "mesh": ["DeviceMesh"],
        "threads": ["run_local", "serial"],
        "trace": ["save_chrome_trace", "start_trace"],
        "traffic": ["Traffic", "messages", "wire_bytes"],
        "transport": ["Transport"],
        "work": ["Work"],
    },
)
