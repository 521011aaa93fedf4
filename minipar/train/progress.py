"""What rank 0 prints while it trains, and the metrics file."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import TextIO

from minipar.comm import Communicator
from minipar.memory import KINDS, MemoryLedger
from minipar.parallel.pipeline import simulate
from minipar.parallel.traffic import buckets
from minipar.train.config import TrainConfig
from minipar.train.traffic import step_layout
from minipar.train.trainer import StepResult

LINES = 10  # plain lines per run when the output is not a terminal
REFRESH_SECONDS = 0.1  # of the live line on a terminal


class Progress:
    """One live line on a terminal, about ten plain lines elsewhere; silent on all ranks but 0."""

    def __init__(self, label: str, steps: int, stream: TextIO | None) -> None:
        self.label, self.steps, self.stream = label, steps, stream
        self.live = stream is not None and stream.isatty()
        self._shown = 0.0

    def __call__(self, result: StepResult) -> None:
        if self.stream is None:
            return
        done = result.step + 1
        text = f"{self.label} {done:>{len(str(self.steps))}}/{self.steps}  loss {result.loss:.4f}"
        text += f"  grad norm {result.grad_norm:.3f}  {result.tokens_per_second:,.0f} tokens/s"
        now = time.monotonic()
        if self.live:
            if done == self.steps or now - self._shown > REFRESH_SECONDS:
                self._shown = now
                print(f"\r\x1b[K{text}", end="\n" if done == self.steps else "", file=self.stream, flush=True)
        elif done == self.steps or result.step % max(1, self.steps // LINES) == 0:
            print(text, file=self.stream, flush=True)


class Metrics:
    """`--metrics`: one JSON line per step, flushed at once so that a running job can be watched. "-" is standard
    output.

    A resumed run appends to the file of the run it continues, less the lines of steps beyond `first_step`, which it
    does again: the file then reads as if nothing had been stopped.
    """

    def __init__(self, path: str | None, first_step: int = 0) -> None:
        self.file: TextIO | None = None
        if path is not None:
            self.file = sys.stdout if path == "-" else open(path, "a", encoding="utf-8")
        if path is not None and path != "-":
            os.truncate(path, _length_before(path, first_step))

    def write(self, result: StepResult) -> None:
        if self.file is not None:
            # json writes floats with repr: the shortest digits that read back as the same number.
            print(json.dumps(dataclasses.asdict(result)), file=self.file, flush=True)

    def close(self) -> None:
        if self.file is not None and self.file is not sys.stdout:
            self.file.close()


def _length_before(path: str, step: int) -> int:
    """Bytes of the leading whole lines of a metrics file that are of steps before `step`."""
    length = 0
    with open(path, "rb") as file:
        for line in file if step > 0 else ():
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break
            except (ValueError, TypeError, KeyError):  # no line of metrics: what a killed run was writing
                break
            length += len(line)
    return length


def save_ledgers(path: str, ledger: MemoryLedger, comm: Communicator) -> None:
    """Collective: rank 0 writes all ranks' ledgers to `path`.

    {"kinds": [...], "ranks": [{"rank", "peak", "peak_parts", "moments": [[phase, [bytes of each kind]], ...]}, ...]}
    """
    account = {"peak": ledger.peak, "peak_parts": ledger.peak_parts, "moments": ledger.moments}
    gathered = comm.gather_bytes(json.dumps(account).encode())
    error = None
    if gathered is not None:
        ranks = [{"rank": rank, **json.loads(data)} for rank, data in enumerate(gathered)]
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"kinds": KINDS, "ranks": ranks}, file)
        except OSError as problem:
            error = f"--memory {path}: {problem.strerror}"
    comm.agree(error)


def describe(config: TrainConfig, ranks: int, parameters: int, tokens: int, source: str) -> str:
    """The first line of a run: what is trained, on what, on how many ranks."""
    model, data = config.model, config.data
    return (
        f"minipar: GPT with {parameters:,} parameters ({model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, {config.run.dtype}) on {tokens:,} tokens of {source}\n"
        f"minipar: {ranks} rank{'s' if ranks > 1 else ''}, {layout(config)}, global batch {data.global_batch} x "
        f"{model.seq_len} tokens, {data.microbatches} microbatch{'es' if data.microbatches > 1 else ''} per replica, "
        f"{config.run.reduction} reduction"
    )


def layout(config: TrainConfig) -> str:
    """dp=2, tp=4 (sequence parallel), ZeRO stage 1"""
    mesh = config.mesh
    tensor = f", tp={mesh.tp}{' (sequence parallel)' if mesh.sequence_parallel else ''}" if mesh.tp > 1 else ""
    stages = f", {mesh.virtual_stages} stages per rank" if mesh.virtual_stages else ""
    pipeline = f", pp={mesh.pp} ({mesh.schedule or '1f1b'}{stages})" if mesh.pp > 1 else ""
    return f"dp={mesh.dp}{tensor}{pipeline}, ZeRO stage {mesh.zero_stage}"


def notes(config: TrainConfig, positions: int) -> list[str]:
    """A line for each thing in a resolved configuration that works and is hardly meant so: what it costs."""
    mesh, m = config.mesh, config.data.microbatches
    stage, found = mesh.zero_stage, []
    layout = step_layout(config, positions)
    if stage > 0 and mesh.dp == 1:
        found.append(f"--zero-stage {stage} shards nothing: dp = 1")
    elif stage == 3 and m > 1:
        gathered = sum(bucket.gathers * bucket.elements for bucket in buckets(layout, pp=0))
        held = sum(bucket.elements for bucket in buckets(layout, pp=0))
        found.append(
            f"--zero-stage 3 gathers parameters for each microbatch's forward and backward: 2*{m} = {2 * m} times per "
            f"step, {gathered:,} elements on rank 0 (--zero-stage 1: {held:,})"
        )
    if stage >= 2 and mesh.dp != 1 and m > 1 and not mesh.sync_every_microbatch:
        remedy = "" if mesh.pp > 1 else "; --sync-every-microbatch keeps them sharded and sends them each time"
        found.append(f"{m} microbatches add up in whole gradients, which --zero-stage {stage} then shards{remedy}")
    if layout.schedule is not None and (m == 1 or layout.schedule.name == "naive"):
        bubble = float(simulate(layout.schedule).bubble_fraction)
        why = "one microbatch" if m == 1 else "--schedule naive"
        found.append(f"{why}: the pipeline's ranks work one after another, bubble {bubble:.3g} (idle / total)")
    return [f"minipar: note: {note}" for note in found]


def written(config: TrainConfig) -> str:
    """What the run has left on the disk, each path with its flag; "" if nothing."""
    run = config.run
    paths = {"metrics": run.metrics, "trace": run.trace, "memory": run.memory, "save": run.save, "export": run.export}
    return ", ".join(f"{path} (--{flag})" for flag, path in paths.items() if path not in (None, "-"))
