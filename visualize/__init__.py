"""Pictures of what minipar measured: timelines, loss curves, bytes. Reads files and plain data, never runs training.

Every `plot_*` function returns a `Picture`: a matplotlib Figure that a notebook shows by itself and `save` writes. A
figure that only one chapter draws is in `chapters/figures*.py`.
"""

from visualize.agreement import plot_agreement, read_layouts
from visualize.communication import plot_bench, plot_bytes
from visualize.loss import plot_loss, read_metrics
from visualize.memory import plot_ledger, read_ledger
from visualize.mesh import MeshTraffic, mesh_numbers, mesh_traffic, plot_mesh
from visualize.schedule import gallery, live_activations, plot_schedule, plot_schedules
from visualize.style import Picture, picture, save, tidy
from visualize.timeline import Trace, parse_trace, plot_timeline, read_trace

__all__ = [
    "MeshTraffic",
    "Picture",
    "Trace",
    "gallery",
    "live_activations",
    "mesh_numbers",
    "mesh_traffic",
    "parse_trace",
    "picture",
    "plot_agreement",
    "plot_bench",
    "plot_bytes",
    "plot_ledger",
    "plot_loss",
    "plot_mesh",
    "plot_schedule",
    "plot_schedules",
    "plot_timeline",
    "read_layouts",
    "read_ledger",
    "read_metrics",
    "read_trace",
    "save",
    "tidy",
]
