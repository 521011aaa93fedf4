"""A picture as text: one line for each element that is drawn, with its place, size, looks and words.

`PYTHONPATH=tests/helpers python -m picture_text` writes tests/visualize/recorded again: look at the difference, and at
the pictures, before it is committed.
"""

import hashlib
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from picture_cases import bench_rows, chrome, rows, slice_event

from minipar.comm import DeviceMesh, run_local, save_chrome_trace, start_trace
from minipar.parallel.pipeline.actions import Durations, simulate
from minipar.parallel.pipeline.schedules import make
from visualize import comparison, measurements, mesh, plan, schedule, timeline

RECORDED = Path(__file__).parents[1] / "visualize" / "recorded"
LOOKS = (
    "linestyle",
    "linewidth",
    "marker",
    "markersize",
    "drawstyle",
    "hatch",
    "fillstyle",
    "fontsize",
    "rotation",
    "ha",
)
MOST = 8  # values that are written out; of more, the first, the last and a digest


# ---- elements as text ------------------------------------------------------------------------------------------------


def values_text(values) -> str:
    """Write values with four digits, so that the last bits of a sum do not count."""
    array = np.asarray(values, dtype=float).round(6)
    words = [f"{value:.4g}" for value in array.reshape(-1) + 0.0]
    if len(words) <= MOST:
        return f"[{' '.join(words)}]"
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
    return f"{array.shape}[{words[0]} {words[1]} .. {words[-1]}] {digest}"


def looks(artist: Artist) -> str:
    """Write the properties of an element that its kind has."""
    words = []
    for name in ("color", "facecolor", "edgecolor"):
        get = getattr(artist, f"get_{name}", None)
        if get is not None:
            found = get()
            several = isinstance(found, np.ndarray) and found.ndim == 2
            words.append(f"{name} {values_text(found) if several else to_hex(found, keep_alpha=True)}")
    for name in (
        "linestyle",
        "linewidth",
        "marker",
        "markersize",
        "drawstyle",
        "hatch",
        "fillstyle",
        "fontsize",
        "rotation",
        "ha",
    ):
        get = getattr(artist, f"get_{name}", None)
        if get is not None:
            words.append(f"{name} {get()}")
    return ", ".join([*words, f"zorder {artist.get_zorder()}", f"label {artist.get_label()}"])


def place(artist: Artist) -> str:
    """Write where an element is, in the coordinates in which it is drawn."""
    if isinstance(artist, Line2D):
        return values_text(artist.get_xydata())
    if isinstance(artist, Text):
        arrow = getattr(artist, "arrow_patch", None)
        ends = values_text([*artist.xy, *artist.xyann]) if arrow is not None else values_text(artist.get_position())
        return f"{ends} {artist.get_text()!r}"
    if isinstance(artist, Collection):
        paths = [path.vertices for path in artist.get_paths()]
        return values_text(np.concatenate(paths)) if paths else values_text(artist.get_offsets())
    if isinstance(artist, AxesImage):
        return f"{values_text(artist.get_extent())} {values_text(artist.get_array())}"
    if isinstance(artist, Legend):
        frame = " framed" if artist.get_frame_on() else ""
        return f"{[text.get_text() for text in artist.get_texts()]}{frame}"
    if isinstance(artist, Patch):
        path = artist.get_patch_transform().transform_path(artist.get_path())
        return values_text(path.vertices)
    return ""


def elements(axes: Axes) -> list[str]:
    """Write the elements of one panel."""
    found = [f"panel {values_text(axes.get_position().bounds)} {axes.get_title(loc='left')!r}"]
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        ticks = [label.get_text() for label in axis.get_ticklabels()]
        limits = values_text(axis.get_view_interval())
        found.append(f"  {name} {axis.get_scale()} {limits} {axis.get_label_text()!r} {ticks} {axis.get_visible()}")
    spines = [side for side, spine in axes.spines.items() if spine.get_visible()]
    found.append(f"  frame {spines}")
    for child in axes.get_children():
        if place(child) and child.get_visible() and child not in (axes.patch, *axes.spines.values()):
            found.append(f"  {type(child).__name__} {place(child)} {looks(child)}")
    return found


def as_text(figure: Figure) -> str:
    """Write all that a picture shows."""
    FigureCanvasAgg(figure).draw()
    found = [f"picture {values_text(figure.get_size_inches())}"]
    for child in (*figure.texts, *figure.legends, *figure.patches):
        found.append(f"{type(child).__name__} {place(child)} {looks(child)}")
    return "\n".join([*found, *(line for axes in figure.axes for line in elements(axes))]) + "\n"


# ---- pictures --------------------------------------------------------------------------------------------------------


def trace(ranks, steps, **sizes):
    """Make a trace by hand, on a mesh of these sizes."""
    data = chrome(ranks, steps)
    data["otherData"]["mesh"] = sizes
    return timeline.parse_trace(data)


def traffic(steps, **sizes):
    """Make the traffic of a ring on each axis and of a message to the next stage."""

    def program(comm, path):
        places = DeviceMesh(comm, **sizes)
        start_trace(comm)
        for _ in range(steps):
            for axis, n in {"tp": 1000, "cp": 203, "dp": 501, "pp": 37}.items():
                getattr(places, axis).all_reduce(np.ones(n), algorithm="ring")
            if places.pp.rank + 1 < places.pp.size:
                places.pp.isend(np.ones(70), places.pp.rank + 1).wait()
            if places.pp.rank > 0:
                places.pp.irecv(np.empty(70), places.pp.rank - 1).wait()
            with comm.tracer.region("optimizer"):
                pass
        save_chrome_trace(path, comm, places)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        run_local(int(np.prod(list(sizes.values()))), program, path, clock="model")
        return mesh.mesh_traffic(timeline.read_trace(path))


def moments(count):
    """Make a ledger: activations grow and go, a buffer comes and goes, and the optimizer's state stays."""
    forward = [("forward", (4096, 4096, 8192, 2048 * i, 0)) for i in range(3)]
    backward = [("backward", (4096, 4096, 8192, 5000, 1024)), ("backward", (4096, 4096, 8192, 3000, 0))]
    return [*forward, *backward, ("optimizer", (4096, 4096, 8192, 0, 0))] * count


def search():
    """Make what the planner writes, as far as it is drawn."""
    plans = []
    for dp, tp, seconds in ((4, 1, 1.0), (2, 2, 1.1), (1, 4, 1.5)):
        times = {name: seconds / (2 + i) / 2 for i, name in enumerate(plan.TIME)}
        held = {name: (1 + i) * 2e9 for i, name in enumerate(plan.MEMORY)}
        sizes = {"dp": dp, "tp": tp, "pp": 1, "zero_stage": 1, "mfu": 0.5 / seconds}
        plans.append(sizes | {"seconds": times | {"total": seconds}, "memory_bytes": held})
    meshes = [each | {"seconds": each["seconds"]["total"], "memory_bytes": 50e9 + each["tp"] * 1e9} for each in plans]
    meshes.append({"dp": 2, "tp": 1, "pp": 2, "seconds": 1.9, "memory_bytes": 45e9})
    about = {"model": {"name": "m"}, "gpus": 4, "gpu": {"name": "g", "memory": 60e9}, "global_batch": 8, "seq_len": 16}
    return about | {"plans": plans, "meshes": meshes, "assumptions": {"memory_used": 0.92}}


def of_milliseconds(search):
    """Make a small model's answer of a planner's: a thousandth of time and memory, and two plans for each mesh."""
    plans = [each | {"zero_stage": stage} for stage in (1, 2) for each in search["plans"]]
    for each in plans:
        each["seconds"] = {part: 1e-3 * value for part, value in each["seconds"].items()}
        each["memory_bytes"] = {part: 1e-3 * value for part, value in each["memory_bytes"].items()}
    small = ("seconds", "memory_bytes")
    meshes = [each | {name: 1e-3 * each[name] for name in small} for each in search["meshes"]]
    return search | {"plans": plans, "meshes": meshes, "gpu": {"name": "g", "memory": 60e6}}


def in_context(search):
    """Make a planner's answer with context and expert parallelism of one mesh, and experts that are not cut."""
    plans = search["plans"]
    plans[0] |= {"cp": 2, "ep": 2, "etp": 1, "zero_replicas": 2}
    plans[0]["seconds"] |= {"cp": 0.2, "ep": 0.1}
    plans[1] |= {"etp": 1}
    meshes = [each | {"cp": 1} for each in search["meshes"]]
    meshes[0] |= {"cp": 2, "ep": 2, "etp": 1}
    meshes[1] |= {"etp": 1}
    return search | {"meshes": meshes}


def pipeline():
    """Make a trace of two stages: actions, collectives of several lengths, and messages, one of them in no lane."""
    tracks = ("computation", "communication tp", "communication world", "communication pp, send and receive")
    names = ("0F0", "0F1", "0I0", "0W0", "0B1", "other", "optimizer")
    lengths = (0.02, 0.03, 0.25, 0.02, 0.02)
    events = []
    for rank in (0, 1):
        for tid, name in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        for step in range(3):
            at = 20.0 * step
            events += [slice_event(name, rank, 0, at + 2.5 * i, 2) for i, name in enumerate(names)]
            events += [slice_event("send", rank, 3, at + 3 * i, 0.4 + 0.3 * i, wait=0.3 * i) for i in range(4)]
            events += [slice_event("all_gather", rank, 1, at + 0.2 * i, each) for i, each in enumerate(lengths)]
            events.append(slice_event("all_reduce", rank, 1, at + 15, 4.5, wait=1.5))
    events += [slice_event("barrier", 0, 2, 21, 0.05), slice_event("broadcast", 0, 2, 21.1, 0.05)]
    for number, tid in enumerate((3, 3, 1)):
        message = {"name": "message", "id": number, "pid": number % 2, "tid": tid}
        events.append(message | {"ph": "s", "ts": (20 + number) * 1e6, "args": {"bytes": 8}})
        events.append(message | {"ph": "f", "pid": 1 - number % 2, "ts": (21 + number) * 1e6})
    mesh_sizes = {"pp": 2, "dp": 1, "tp": 1}
    return timeline.parse_trace({"traceEvents": events, "otherData": {"clock": "cpu", "mesh": mesh_sizes}})


def experts():
    """Make the traffic of tokens that go to experts, and of gradients: between the ranks of cp, for each of tp."""
    tokens = {("ep", 0, 2): [2, 900], ("ep", 2, 0): [2, 1300], ("ep", 1, 3): [1, 0]}
    sums = {("dp", 0, 2): [1, 4000], ("dp", 3, 1): [1, 4000]}
    return mesh.MeshTraffic({"pp": 1, "dp": 1, "cp": 2, "tp": 2}, 2, tokens | sums | {("tp", 0, 1): [3, 5000]})


def wide():
    """Make the traffic of 2 x 2 x 3 ranks: a ring along tp, little in the other direction, a message of pp and dp."""
    sums = {("tp", 0, 1): [4, 3000], ("tp", 2, 0): [4, 2000], ("tp", 1, 2): [1, 30], ("tp", 2, 1): [1, 970]}
    return mesh.MeshTraffic({"pp": 2, "dp": 2, "tp": 3}, 1, sums | {("pp", 0, 6): [1, 700], ("dp", 3, 0): [1, 9]})


def gradients():
    """Make the traffic of 2 x 2 x 2 ranks. Their gradients go along dp, along cp, and along both at once."""
    sums = {("dp", 0, 2): [1, 800], ("dp", 2, 6): [1, 700], ("dp", 6, 4): [1, 600], ("dp", 4, 0): [1, 500]}
    across = {("dp", 1, 7): [2, 400], ("dp", 5, 3): [2, 300]}
    return mesh.MeshTraffic({"pp": 1, "dp": 2, "cp": 2, "tp": 2}, 1, sums | across | {("cp", 1, 3): [1, 900]})


def ring():
    """Make the traffic of three ranks of cp whose gradients go the same ways."""
    tokens = {("cp", 0, 1): [1, 900], ("cp", 1, 2): [1, 900], ("cp", 2, 0): [1, 900]}
    sums = {("dp", 0, 1): [1, 300], ("dp", 2, 0): [1, 200]}
    return mesh.MeshTraffic({"pp": 1, "dp": 1, "cp": 3, "tp": 1}, 1, tokens | sums)


def layouts():
    """Make rows of `bench layouts --machine`."""
    row = {"dp": 1, "tp": 1, "pp": 1, "zero_stage": 0, "schedule": None, "sequence_parallel": False}
    row |= {"recompute": "none", "microbatches": 1, "seconds": 0.5, "seconds_min": 0.4, "seconds_max": 0.7}
    row |= {"predicted_seconds": 0.55, "peak_bytes": 4_000_000, "predicted_bytes": 3_000_000}
    return [row, row | {"dp": 4, "pp": 2, "zero_stage": 3, "schedule": "1f1b", "seconds": 0.6, "peak_bytes": 2_000_000}]


def schedules():
    """Simulate two schedules, one with messages that take time."""
    times = Durations(Fraction(1), Fraction(2), Fraction(1, 2), Fraction(1, 4))
    return {"zb-h1": simulate(make("zb-h1", 3, 4), times), "interleaved-1f1b": simulate(make("interleaved-1f1b", 2, 4))}


COMPARED = ("gpipe", "1f1b", "zb-h1")
RATIOS = {step: {f"p{i}": None if step < i else 2.0 ** (i - 3) for i in range(6)} for step in range(4)}
LOSSES = [5 - 4 * i / (i + 50) + 0.1 * (i % 3) for i in range(300)]
TWO = {"one": rows(LOSSES[:20]), "two": rows([2 * loss for loss in LOSSES[:20]])}
TABLE = [{"op": "all_reduce", "bytes": 700, "expected": 600}, {"op": "broadcast", "bytes": 90}]
# One or more of each kind, small and of fixed values.
PICTURES: dict[str, Callable[[], Figure]] = {
    "timeline": lambda: timeline.plot_timeline(trace(4, 3, pp=2, dp=2, tp=1), arrows=True),
    "timeline_of_steps": lambda: timeline.plot_timeline(trace(2, 6, pp=1, dp=2, tp=1), slice(1, 5)),
    "timeline_of_a_pipeline": lambda: timeline.plot_timeline(pipeline(), slice(1, 2), arrows=True),
    "mesh_cube": lambda: mesh.plot_mesh(traffic(2, pp=2, dp=2, tp=2)),
    "mesh_of_stages": lambda: mesh.plot_mesh(traffic(1, pp=3, dp=3)),
    "mesh_of_context": lambda: mesh.plot_mesh(traffic(1, pp=2, dp=2, cp=2, tp=2)),
    "mesh_of_one_axis": lambda: mesh.plot_mesh(traffic(1, dp=5)),
    "mesh_of_two": lambda: mesh.plot_mesh(traffic(3, pp=2)),
    "mesh_of_experts": lambda: mesh.plot_mesh(experts()),
    "mesh_of_twelve": lambda: mesh.plot_mesh(wide()),
    "mesh_of_a_ring": lambda: mesh.plot_mesh(ring()),
    "mesh_of_gradients": lambda: mesh.plot_mesh(gradients()),
    "loss": lambda: measurements.plot_loss({"": rows(LOSSES)}, 1.5, "entropy"),
    "losses": lambda: measurements.plot_loss(TWO),
    "bytes": lambda: measurements.plot_bytes(TABLE),
    "bytes_of_nothing": lambda: measurements.plot_bytes([{"op": "barrier", "bytes": 0}]),
    "bench": lambda: measurements.plot_bench(bench_rows()),
    "memory": lambda: measurements.plot_ledger({"a": moments(1), "b": moments(2)}),
    "plan": lambda: plan.plot_plan(search()),
    "plan_of_milliseconds": lambda: plan.plot_plan(of_milliseconds(search())),
    "plan_in_context": lambda: plan.plot_plan(in_context(search())),
    "layouts": lambda: plan.plot_agreement(layouts()),
    "comparison": lambda: comparison.plot_comparison(RATIOS),
    "comparison_of_many_steps": lambda: comparison.plot_comparison(dict.fromkeys(range(40, 67), RATIOS[3])),
    "schedule": lambda: schedule.plot_schedule(simulate(make("1f1b", 3, 5))),
    "schedule_of_pairs": lambda: schedule.plot_schedule(
        simulate(make("dualpipev", 2, 4), Durations(comm=Fraction(1, 4)))
    ),
    "schedule_of_stages": lambda: schedule.plot_schedule(simulate(make("interleaved-1f1b", 2, 2, 3))),
    "schedules": lambda: schedule.plot_schedules(schedules()),
    "schedules_compared": lambda: schedule.plot_schedule({name: simulate(make(name, 3, 4)) for name in COMPARED}),
    "schedule_in_seconds": lambda: schedule.plot_schedule(schedules()["zb-h1"], seconds=True),
}


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for title, draw in PICTURES.items():
        (RECORDED / f"{title}.txt").write_text(as_text(draw()), encoding="utf-8")
