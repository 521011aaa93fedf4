"""The comparison of two records: files changed at random, and every flag."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from fuzz.strategies import cases, changed, command_lines, damaged, or_no_file, to_json
from fuzz.worker import Case
from hypothesis import strategies as st

from minipar.compare.record import Record

MAIN = "fuzz.worker:compare"
FACTS = {"dtype": "float64", "dp": 2, "tokens": 64}


@cache
def record() -> dict[str, bytes | str]:
    """Return the files of a record of one step: {name: content}."""
    with TemporaryDirectory() as directory:
        values = {"h.0.ln_1.bias": np.ones(3), "wte.weight": np.ones((4, 2))}
        written = Record(Path(directory, "a"), values, **FACTS)
        written.step(0, 2.0, 1.0, values, {name: 2 * array for name, array in values.items()})
        return {path.name: path.read_bytes() for path in Path(directory, "a").iterdir()}


RUN = {**FACTS, "shapes": {"h.0.ln_1.bias": [3], "wte.weight": [4, 2]}}


def case(argv: tuple[str, ...], run: bytes | str, step: bytes | str) -> Case:
    files = {f"a/{name}": content for name, content in record().items()}
    named = tuple(value for flag, value in zip(argv, argv[1:], strict=False) if flag == "--json")
    named += tuple(word.partition("=")[2] for word in argv if word.startswith("--json="))
    return Case(argv, files | {"b/run.json": run, "b/step-0.npz": step}, outputs=named)


def test_two_records_are_compared_or_refused(fuzzed):
    facts = changed(RUN).map(lambda value: to_json(value).encode("utf-8", "surrogatepass")).flatmap(damaged)
    runs = st.just(to_json(RUN).encode()) | or_no_file(facts)
    steps = st.just(record()["step-0.npz"]) | or_no_file(damaged(record()["step-0.npz"]))
    flags = {"--bound": ["0", "1e-9", "0.5"], "--json": ["-", "o.json", "/dev/full"], "": ["a b", "a a", "a missing"]}
    lines = command_lines({"": ["a", "b"]}, flags)
    count = fuzzed(MAIN, cases(case, argv=lines, run=runs, step=steps), share=0.02, warm=case(("a", "a"), b"", b""))
    assert 0 < count.succeeded < count.cases
