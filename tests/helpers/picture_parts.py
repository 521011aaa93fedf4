"""Parts of drawn pictures and the simulated schedules that are drawn, for the tests of visualize."""

from matplotlib.patches import FancyArrowPatch

from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make


def timeline(name="1f1b", p=4, m=8, v=None, **durations):
    """Simulate a schedule of p ranks and m microbatches."""
    return simulate(make(name, p, m, v), Durations(**durations))


def mesh_lines(figure):
    """Return {(axis, rank, higher rank): line} of a drawn mesh; heads are patches of their own."""
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch) and patch.get_gid()]
    return {(axis, int(low), int(high)): patch for patch in patches for axis, low, high in [patch.get_gid().split()]}


def mesh_heads(figure):
    """Return the patches of a drawn mesh that are heads of its lines."""
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch) and not patch.get_gid()]


def texts(figure):
    """Return the texts of a picture's first panel."""
    return [text.get_text() for text in figure.axes[0].texts]
