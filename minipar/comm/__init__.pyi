"""The public names; lazy_loader reads this file, and so do editors and type checkers."""

from .algorithms import ALGORITHMS as ALGORITHMS
from .algorithms import chunk_bounds as chunk_bounds
from .chrome_trace import chrome_events as chrome_events
from .chrome_trace import save_chrome_trace as save_chrome_trace
from .chrome_trace import start_trace as start_trace
from .clock import CpuClock as CpuClock
from .clock import ModelClock as ModelClock
from .clock import Network as Network
from .clock import Tracer as Tracer
from .clock import WallClock as WallClock
from .communicator import Communicator as Communicator
from .launch import world as world
from .mesh import DeviceMesh as DeviceMesh
from .threads import run_local as run_local
from .threads import serial as serial
from .traffic import messages as messages
from .traffic import wire_bytes as wire_bytes
from .transport import Transport as Transport
from .work import Work as Work
