"""Collectives written from isend and irecv, over MPI and over threads, with counted traffic, clocks and a trace.

Reading order. One call goes through the first three files:

    communicator    the operations: check the arrays, choose an algorithm, run it. mesh: a communicator per axis
    algorithms      chunks of an array, and each algorithm of an operation as a generator of messages
    transport       isend and irecv, the interface. mpi and threads implement it
    work            drives the generators, blocking or asynchronous; a user's single messages
    traffic         counts messages and bytes; closed forms of what each algorithm sends
    clock           wall time or logical time, the network's prices, and the recorder of a rank's work
    trace           operations that take time and are drawn, and the Chrome trace of all ranks
    launch          the beginning and the end of a program under mpirun or as threads
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
