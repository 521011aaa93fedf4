"""Collectives written from isend and irecv, over MPI and over threads; with counted traffic, clocks and a trace."""

from minipar.comm.chunks import chunk_bounds
from minipar.comm.clock import CpuClock, HostNetwork, ModelClock, Network, WallClock
from minipar.comm.communicator import Communicator
from minipar.comm.engine import Work
from minipar.comm.launch import Parser, main, world
from minipar.comm.local import run_local, serial
from minipar.comm.mesh import DeviceMesh
from minipar.comm.messages import Message
from minipar.comm.selection import ALGORITHMS
from minipar.comm.trace import Tracer, save_chrome_trace, start_trace
from minipar.comm.traffic import Traffic
from minipar.comm.transport import Transport
from minipar.comm.volume import messages, wire_bytes

__all__ = [
    "ALGORITHMS",
    "Communicator",
    "CpuClock",
    "DeviceMesh",
    "Message",
    "ModelClock",
    "HostNetwork",
    "Network",
    "Parser",
    "Tracer",
    "Traffic",
    "Transport",
    "WallClock",
    "Work",
    "chunk_bounds",
    "main",
    "messages",
    "run_local",
    "save_chrome_trace",
    "serial",
    "start_trace",
    "wire_bytes",
    "world",
]
