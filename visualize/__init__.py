"""Pictures of what minipar measured: timelines, loss curves, bytes. Reads files and plain data, never runs training.

Every `plot_*` function returns a `Picture`: a matplotlib Figure that a notebook shows by itself and `save` writes.
"""

from visualize.agreement import plot_agreement, read_layouts
from visualize.communication import plot_bench, plot_bytes
from visualize.costs import plot_bubbles, plot_fit, plot_wires
from visualize.explore import explore_schedules
from visualize.forecast import plot_points, plot_predictions, plot_scaling, plot_spending, plot_tornado
from visualize.layouts import plot_layouts, plot_placements
from visualize.links import MeshTraffic, mesh_numbers, mesh_traffic
from visualize.loss import plot_loss, read_metrics
from visualize.measured import live_activations, measured_durations, measured_timeline, predicted_timeline
from visualize.memory import plot_ledger, plot_memory, read_ledger
from visualize.mesh import plot_mesh
from visualize.model import plot_graph, plot_shares
from visualize.overlap import plot_bucket_sizes
from visualize.schedule import gallery, plot_measured, plot_schedule, plot_schedules
from visualize.show import show, show_source
from visualize.style import Picture, picture, save, tidy
from visualize.tensor import plot_activations, plot_cuts, plot_links
from visualize.timeline import Trace, parse_trace, plot_timeline, read_trace

__all__ = [
    "MeshTraffic",
    "Picture",
    "Trace",
    "explore_schedules",
    "gallery",
    "live_activations",
    "measured_durations",
    "measured_timeline",
    "mesh_numbers",
    "mesh_traffic",
    "parse_trace",
    "picture",
    "plot_activations",
    "plot_agreement",
    "plot_bench",
    "plot_bubbles",
    "plot_bucket_sizes",
    "plot_bytes",
    "plot_cuts",
    "plot_fit",
    "plot_graph",
    "plot_layouts",
    "plot_ledger",
    "plot_links",
    "plot_loss",
    "plot_measured",
    "plot_memory",
    "plot_mesh",
    "plot_placements",
    "plot_points",
    "plot_predictions",
    "plot_scaling",
    "plot_schedule",
    "plot_schedules",
    "plot_shares",
    "plot_spending",
    "plot_timeline",
    "plot_tornado",
    "plot_wires",
    "predicted_timeline",
    "read_layouts",
    "read_ledger",
    "read_metrics",
    "read_trace",
    "save",
    "show",
    "show_source",
    "tidy",
]
