"""The traces that the page of traces shows at first: trainings of eight or four ranks, recorded on threads.

The first is measured, with the flags of `make demo`. The others are on the model clock, which is exactly repeatable: a
rank computes FLOPS operations in a second. All have the demo's network.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from chapters.support.training import make_trainer
from minipar.comm import Communicator, ModelClock, Network, run_local, save_chrome_trace, start_trace

FLOPS = 2e10
NETWORK = (20e-6, 1e-9)
MODEL = "--hidden 128 --heads 4 --seq-len 64 --global-batch 32 --lr 2e-3 --clip-grad 1 --dtype float64"
CUBE = f"{MODEL} --layers 2 --dp 2 --tp 2 --pp 2 --zero-stage 1 --sequence-parallel --microbatches 4"
PIPELINE = f"{MODEL} --layers 4 --pp 4 --microbatches 8"


class Example(NamedTuple):
    """A training to record: its name on the page, its ranks, and the flags of `minipar.train`."""

    words: str
    ranks: int
    flags: str
    measured: bool = False


EXAMPLES = {
    "demo": Example("the demo: dp 2 x tp 2 x pp 2, measured", 8, f"{CUBE} --steps 2", measured=True),
    "cube": Example("the demo on the model clock", 8, f"{CUBE} --steps 1"),
    "dp": Example("the demo's model on dp 8, model clock", 8, f"{MODEL} --layers 2 --dp 8 --steps 1"),
    "1f1b": Example("pp 4 with 1F1B, model clock", 4, f"{PIPELINE} --schedule 1f1b --steps 1"),
    "zb-h1": Example("pp 4 with ZB-H1, model clock", 4, f"{PIPELINE} --schedule zb-h1 --steps 1"),
}


def train(comm: Communicator, flags: str, path: str) -> None:
    """Train with these flags, and write the trace of all ranks."""
    trainer = make_trainer(comm, flags)
    start_trace(comm)
    for _ in trainer.train():
        pass
    save_chrome_trace(path, comm, trainer.mesh)


def record(example: Example) -> dict[str, Any]:
    """Return the trace of an example, with times to the nanosecond and without what the page does not read."""
    clock = "cpu" if example.measured else partial(ModelClock, FLOPS)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        run_local(example.ranks, train, example.flags, path, clock=clock, network=Network(*NETWORK))
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
    for event in trace["traceEvents"]:
        event.pop("cat", None)
        for key in ("ts", "dur"):
            if key in event:
                event[key] = round(event[key], 3)
        if "wait" in event.get("args", {}):
            event["args"]["wait"] = round(event["args"]["wait"], 9)
    return trace


def script() -> str:
    """Return the examples as a script that the page loads before its viewer."""
    recorded = {name: {"words": example.words, "trace": record(example)} for name, example in EXAMPLES.items()}
    return f"const TRACES = {json.dumps(recorded, separators=(',', ':'))};\n"
