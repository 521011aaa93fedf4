"""Pictures of what minipar measured: timelines, loss curves, bytes. Reads files and plain data, never runs training.

Every `plot_*` function returns a `Picture`: a matplotlib Figure that a notebook shows by itself and `save` writes. A
figure that only one chapter draws is in `chapters/support/chNN/`. Importing this package imports none of its files: a
name is imported from its file when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "comparison": ["plot_comparison", "read_comparison"],
        "measurements": ["plot_bench", "plot_bytes", "plot_ledger", "plot_loss", "read_ledger", "read_metrics"],
        "mesh": ["MeshTraffic", "mesh_values", "mesh_traffic", "plot_mesh"],
        "plan": ["plot_agreement", "read_layouts"],
        "schedule": ["gallery", "live_activations", "plot_schedule", "plot_schedules"],
        "style": ["Picture", "picture", "save", "tidy"],
        "timeline": ["Trace", "parse_trace", "plot_timeline", "read_trace"],
    },
)
