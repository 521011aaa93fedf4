"""Collectives written from isend and irecv, over MPI and over threads, with counted traffic, clocks and a trace.

Reading order. One call goes through three files:

    communicator    `Communicator.all_reduce` and the other operations: check the arrays, choose an algorithm, run it
    reductions      all_reduce and reduce_scatter, each algorithm a generator of messages
    gathers         chunks of an array; all_gather, broadcast, all_to_all and barrier
    transport       isend and irecv, the interface. mpi and threads implement it

Around them:

    work            drives the generators, blocking or asynchronous; a user's single messages
    traffic         counts messages and bytes; closed forms of what each algorithm sends
    clock, timed    wall time or logical time, and operations that take time
    trace           the Chrome trace of all ranks
    mesh            DeviceMesh: one communicator per axis
    launch          the beginning and the end of a program under mpirun or as threads
"""

from minipar.comm.clock import CpuClock, HostNetwork, ModelClock, Network, WallClock
from minipar.comm.communicator import ALGORITHMS, Communicator
from minipar.comm.gathers import chunk_bounds
from minipar.comm.launch import launch, main, world
from minipar.comm.mesh import DeviceMesh
from minipar.comm.threads import run_local, serial
from minipar.comm.trace import Tracer, save_chrome_trace, start_trace
from minipar.comm.traffic import Traffic, messages, wire_bytes
from minipar.comm.transport import Transport
from minipar.comm.work import Message, Work

__all__ = [
    "ALGORITHMS", "Communicator", "CpuClock", "DeviceMesh", "Message", "ModelClock", "HostNetwork", "Network",
    "Tracer", "Traffic", "Transport", "WallClock", "Work", "chunk_bounds", "launch", "main", "messages", "run_local",
    "save_chrome_trace", "serial", "start_trace", "wire_bytes", "world",
]  # fmt: skip
