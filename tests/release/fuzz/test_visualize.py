"""The pictures: every kind of input file, changed at random, read and drawn; and every flag."""

from __future__ import annotations

from typing import Any

from fuzz.strategies import cases, changed, command_lines, damaged, json_files, names, or_no_file, to_json
from fuzz.worker import Case
from hypothesis import strategies as st

MAIN = "visualize.__main__:main"
READ = "fuzz.worker:read"


def _event(kind: str, rank: int, start: float, **values: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": rank, "tid": 1, "ts": start * 1e6, "name": "message", **values}


def _trace() -> dict[str, Any]:
    """Two ranks, two steps, a message between them."""
    events: list[dict[str, Any]] = []
    for rank in (0, 1):
        for tid, name in ((0, "computation"), (1, "communication dp")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        for step in (0, 1):
            at = 10.0 * step
            events.append(_event("X", rank, at, dur=2e6, name="0F1", tid=0))
            events.append(_event("X", rank, at + 6, dur=3e6, name="all_reduce", args={"bytes": 8, "wait": 1.0}))
            events.append(_event("X", rank, at + 9, dur=1e6, name="optimizer", tid=0))
        events.append(_event("s", rank, 6, id=f"m{rank}", args={"bytes": 8}))
        events.append(_event("f", 1 - rank, 9, id=f"m{rank}"))
    return {"traceEvents": events, "otherData": {"clock": "model", "mesh": {"pp": 1, "dp": 2, "tp": 1}}}


KINDS = ["parameters", "gradients", "optimizer", "activations", "buffers"]
MOMENTS = [["start", [8, 0, 0, 0, 0]], ["forward", [8, 0, 0, 4, 1]], ["backward", [8, 8, 0, 2, 0]]]
BENCH = {
    "op": "all_reduce", "algorithm": "ring", "ranks": 2, "bytes": 8, "seconds": 1e-5, "mpi_seconds": 2e-5,
    "wire_bytes": 8, "wire_bytes_expected": 8,
}  # fmt: skip
TIME = dict.fromkeys(("compute", "tp", "pp", "dp", "bubble", "optimizer", "total"), 0.5)
PLAN = {
    "dp": 2, "tp": 1, "pp": 1, "zero_stage": 1, "mfu": 0.5, "seconds": TIME, "memory_bytes": dict.fromkeys(KINDS, 1e9),
}  # fmt: skip
MESHES = [{"dp": dp, "tp": 1, "pp": 2 // dp, "seconds": 1.0 * dp, "memory_bytes": 2e9} for dp in (1, 2)]
LAYOUT = {
    "dp": 2, "tp": 1, "pp": 1, "zero_stage": 0, "schedule": None, "sequence_parallel": False, "recompute": "none",
    "microbatches": 1, "seconds_min": 0.1, "seconds": 0.2, "seconds_max": 0.3, "predicted_seconds": 0.2,
    "peak_bytes": 1000, "predicted_bytes": 1100,
}  # fmt: skip
VALID: dict[str, Any] = {
    "trace": _trace(),
    "mesh": _trace(),
    "memory": {"kinds": KINDS, "ranks": [{"rank": rank, "moments": MOMENTS} for rank in (0, 1)]},
    "traffic": [BENCH, BENCH | {"bytes": 16, "mpi_seconds": None}],
    "plan": {
        "plans": [PLAN, PLAN | {"dp": 1, "pp": 2}], "meshes": MESHES, "gpu": {"name": "a100", "memory": 8e10},
        "model": {"name": "gpt2"}, "gpus": 2, "global_batch": 8, "seq_len": 64, "assumptions": {"memory_used": 0.92},
    },
    "layouts": [LAYOUT, LAYOUT | {"tp": 2, "schedule": "1f1b", "microbatches": 2}],
    "compare": {"ratios": {str(step): {"a": None, "b": 2.0, "c": 0.0, "d": "Infinity"} for step in (0, 1)}},
}  # fmt: skip
LINES = [{"step": step, "loss": 5.0 - step} for step in range(4)]


def contents(kind: str) -> st.SearchStrategy[bytes]:
    """Files of one kind."""
    if kind != "loss":
        return json_files(VALID[kind])
    rows = changed(LINES).map(lambda value: value if isinstance(value, list) else [value])
    texts = rows.map(lambda rows: "".join(to_json(row) + "\n" for row in rows).encode("utf-8", "surrogatepass"))
    return texts.flatmap(damaged)


kinds = st.sampled_from(("loss", *VALID))


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str, bytes | str]:
    """(command, name of a file, its content)"""
    kind = draw(kinds)
    return kind, draw(names(".json")), draw(or_no_file(contents(kind)))


WARM = Case(("schedule", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--out", "a.svg"))


READ_WARM = Case(("loss", "a"), {"a": b'{"step":0,"loss":1}'})


def read_case(file: tuple[str, str, bytes | str]) -> Case:
    kind, name, content = file
    return Case((kind, name), {name: content})


def test_a_file_is_read_or_refused(fuzzed):
    count = fuzzed(READ, st.builds(read_case, files()), share=0.20, warm=READ_WARM)
    assert 0 < count.succeeded < count.cases


def test_a_file_is_drawn_or_refused(fuzzed):
    def case(file: tuple[str, str, bytes | str], out: str) -> Case:
        kind, name, content = file
        return Case((kind, name, "--out", out), {name: content}, outputs=(out,))

    outs = names().flatmap(lambda stem: st.sampled_from((".png", ".svg", ".svg", ".pdf", ".gif")).map(stem.__add__))
    count = fuzzed(MAIN, cases(case, file=files(), out=outs), share=0.06, warm=WARM)
    assert 0 < count.succeeded < count.cases


FLAGS = {
    "trace": {"--steps": ["0:1", "-1:", ":", "5:"], "--arrows": [], "--json": ["-", "o.json", "/dev/full"]},
    "mesh": {"--json": ["-", "o.json", "/dev/full"]},
    "loss": {"--reference": ["1.5", "-2"], "--reference-label": ["entropy", "$x$", "a\nb", "\udcff", "_"]},
    "memory": {"--rank": ["0", "1", "2"]},
    "traffic": {},
    "plan": {},
    "layouts": {},
    "compare": {},
}
COMMON = {"--out": ["o.svg", "o.png", "new/o.svg", "/dev/full", "directory", "directory.png"], "": ["file", "missing"]}


@st.composite
def lines(draw: st.DrawFn) -> Case:
    """A command line of one of the commands that read a file."""
    kind = draw(st.sampled_from([*FLAGS] * 9 + ["gallery"]))  # which draws three large pictures
    valid = {"": [kind, *(["file"] if kind != "gallery" else [])], "--out": ["o.svg"]}
    argv = draw(command_lines(valid, FLAGS.get(kind, {}) | COMMON))
    text = b'{"step": 0, "loss": 1.0}\n' if kind == "loss" else to_json(VALID.get(kind)).encode()
    made = {"file": text, "directory": "directory", "directory.png": "directory"}
    return Case(argv, made, outputs=named_outputs(argv))


def named_outputs(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return what follows a flag that names an output."""
    flags = ("--out", "--json", "--csv")
    named = [value for flag, value in zip(argv, argv[1:], strict=False) if flag in flags]
    return (*named, *(word.partition("=")[2] for word in argv if word.startswith(tuple(f"{flag}=" for flag in flags))))


def test_flags_draw_or_are_refused(fuzzed):
    count = fuzzed(MAIN, lines(), share=0.01, warm=WARM)
    assert 0 < count.succeeded < count.cases
