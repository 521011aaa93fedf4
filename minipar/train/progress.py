"""Everything that rank 0 prints while it trains, and the files that a run writes besides checkpoints."""

import dataclasses
import itertools
import json
import math
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self, TextIO

import numpy as np

from minipar.cli import discard, open_to_append, say, writing
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, printable
from minipar.memory import KINDS, MemoryLedger
from minipar.nn.pretrained import read_json, save_pretrained
from minipar.nn.transformer import LanguageModel
from minipar.train.checkpoint import agreeing, prepare_directory
from minipar.train.settings import TrainConfig, flags
from minipar.train.trainer import StepResult

LINES = 10  # a run prints about as many lines of progress
EXPORT_FILES = ("model.safetensors", "config.json")  # `save_pretrained` writes these


def progress_stream(config: TrainConfig, rank: int = 0) -> TextIO | None:
    """Return where rank 0 prints: standard error if `--metrics -` takes standard output, which then holds only JSON."""
    return None if rank > 0 else sys.stderr if config.run.metrics == "-" else sys.stdout


class Progress:
    """About ten lines in a run, one for each evaluation, and no silence of ten seconds; nothing on all ranks but 0.

    Inside a `with` block a thread speaks when one step, or what follows it, takes longer than that.
    It has ended after the block, however the block ends.
    """

    silence = 10.0  # seconds

    def __init__(
        self, steps: int, stream: TextIO | None, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps = steps
        self.stream = stream
        self.first = done  # steps that were done before this run
        self.done = done
        self.clock = clock
        self.started = self.step_started = self.spoken = clock()
        self._lock = threading.Lock()  # the thread reads what `__call__` changes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self.stream is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def __call__(self, result: StepResult, validation: float | None = None) -> None:
        """Report a step, if a line is due: also if the next one might end after more than `silence` seconds."""
        with self._lock:
            now = self.clock()
            seconds = now - self.step_started
            self.done = result.step + 1
            self.step_started = now
            every = max(1, self.steps // LINES)
            late = now - self.spoken + seconds >= self.silence
            if validation is not None or self.done == self.steps or result.step % every == 0 or late:
                self._say(self._line(result, validation), now)

    def _line(self, result: StepResult, validation: float | None) -> str:
        text = f"step {self.done:>{len(str(self.steps))}}/{self.steps}  loss {result.loss:.4f}"
        text += f"  grad norm {result.grad_norm:.3f}  {result.tokens_per_second:,.0f} tokens/s"
        average = (self.step_started - self.started) / (self.done - self.first)
        remaining = average * (self.steps - self.done)
        text += f"  {timedelta(seconds=round(remaining))} left" if remaining >= 1 else ""
        text += f"  {result.skipped} steps skipped" if result.skipped else ""
        return text + (f"  eval loss {validation:g}" if validation is not None else "")

    def remind(self) -> None:
        """Say what takes so long, if no line has come for `silence` seconds."""
        with self._lock:
            now = self.clock()
            if now - self.spoken < self.silence:
                return
            step = min(self.done + 1, self.steps)
            what = "has run" if self.done < self.steps else "is done, and what follows has run"
            self._say(f"step {step}/{self.steps} {what} for {now - self.step_started:.0f} s", now)

    def _say(self, text: str, now: float) -> None:
        self.spoken = now
        say(text, self.stream)

    def _watch(self) -> None:
        """Remind until the block has ended."""
        while not self._ended.wait(max(0.0, self.spoken + self.silence - self.clock())):
            self.remind()


def prepare_outputs(config: TrainConfig, first_step: int = 0) -> None:
    """Prove before hours of training that all output can be written, and make directories for it.

    UsageError.
    """
    run = config.run
    files = {"--metrics": run.metrics if run.metrics != "-" else None, "--trace": run.trace, "--memory": run.memory}
    outputs = [(flag, path) for flag, path in files.items() if path is not None]
    for (flag, path), (other, same) in itertools.combinations(outputs, 2):
        if Path(path).resolve() == Path(same).resolve():
            raise UsageError(f"{flag} and {other} would both write {path}")
    for flag, path in outputs:
        if os.path.isdir(path) or (flag != "--metrics" and Path(path).is_fifo()):  # what is written at the end may hang
            raise UsageError(f"{flag} {path} is a {'directory' if os.path.isdir(path) else 'pipe'}; expected a file")
        with writing(f"{flag} {path}"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if os.path.isfile(path) or not os.path.exists(path):  # who reads a pipe takes closing it for its end
                open_to_append(path).close()
    if run.export is not None:
        with writing(f"--export {run.export}"):
            Path(run.export).mkdir(parents=True, exist_ok=True)
            check_export(run.export)
            tempfile.TemporaryFile(dir=run.export).close()
    if run.save is not None:
        prepare_directory(run.save, first_step)


def check_export(directory: str) -> None:
    """Raise UsageError if `--export` would mix with, or replace, what no export wrote.

    An export's config.json has no token ids. Those that transformers writes name its version;
    OpenAI's have token ids.
    """
    names = set(os.listdir(directory)) - {f"{name}.partial" for name in EXPORT_FILES}
    content = read_json(Path(directory, "config.json")) if "config.json" in names else {}
    has_no_ids = "bos_token_id" in content and content["bos_token_id"] is None
    if has_no_ids and "transformers_version" not in content:
        names = {name for name in names if name not in EXPORT_FILES or not Path(directory, name).is_file()}
    if names:
        wrote = "which no export of minipar wrote; export to another directory"
        raise UsageError(f"--export {directory} holds {', '.join(sorted(names)[:3])}, {wrote}")


def write_export(model: LanguageModel, directory: str, state: dict[str, np.ndarray]) -> None:
    """Write the model as a directory.

    UsageError if the disk is full; then no half-written file is left.
    """
    with writing(f"--export {directory}", *(Path(directory, f"{name}.partial") for name in EXPORT_FILES)):
        save_pretrained(model, directory, state)


class Metrics:
    """The file of `--metrics`: one JSON line per step, flushed at once so that a running job can be watched.

    "-" is standard output. A resumed run appends to its file, less the lines of steps from
    `first_step` on.
    """

    def __init__(self, path: str | None, first_step: int = 0) -> None:
        self.path = path
        self.file = None if path != "-" else sys.stdout
        self.error = ""
        self.length: int | None = None  # bytes of whole lines; None for a device or a pipe, which cannot be cut off
        if path is not None and path != "-":
            with writing(f"--metrics {path}"):
                self.file = open_to_append(path)
                if stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
                    self.length = _length_before(path, first_step)
                    self.file.truncate(self.length)

    def write(self, result: StepResult, validation: float | None = None) -> None:
        """Append a line.

        If the disk is full, training continues without metrics, and `close` raises the error.
        The file then ends with its last whole line.
        """
        if self.file is None:
            return
        try:
            # json writes floats with repr: the shortest digits that read back as the same value.
            line = dataclasses.asdict(result) | {"eval_loss": validation}
            line = {name: value if math.isfinite(value) else None for name, value in line.items() if value is not None}
            text = json.dumps(line) + "\n"
            print(text, end="", file=self.file, flush=True)
            if self.length is not None:
                self.length += len(text)  # ASCII
        except OSError as error:
            self.error = f"--metrics {self.path} cannot be written: {error.strerror or error}"
            if self.length is not None:
                os.ftruncate(self.file.fileno(), self.length)
            discard(self.file)
            if self.file is not sys.stdout:
                say(f"minipar: note: {printable(self.error)}; training continues without it", sys.stdout)

    def close(self) -> None:
        """Close the file.

        UsageError if a line could not be written, or if the file is not at its path any more.
        """
        if self.file is not None and self.file is not sys.stdout:
            own = os.fstat(self.file.fileno())
            there = Path(str(self.path))
            if not self.error and not (there.exists() and os.path.samestat(own, there.stat())):
                self.error = f"--metrics {self.path} was removed or renamed during the training"
            self.file.close()
        if self.error:
            raise UsageError(self.error)


def _length_before(path: str, step: int) -> int:
    """Return how many bytes the leading complete lines of steps before `step` take in a metrics file."""
    length = 0
    # What is not a line of metrics is what a killed run was writing; such lines end the count.
    with open(path, "rb") as file, suppress(ValueError, TypeError, KeyError):
        for line in file if step > 0 else ():
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
            length += len(line)
    return length


def save_ledgers(path: str, ledger: MemoryLedger, comm: Communicator) -> None:
    """Write all ranks' ledgers to `path`. All ranks call it, and rank 0 writes.

    {"kinds": [...], "ranks": [{"rank", "peak", "peak_parts", "moments": [[phase, [bytes of each
    kind]], ...]}, ...]}
    """
    account = {"rank": comm.rank, "peak": ledger.peak, "peak_parts": ledger.peak_parts, "moments": ledger.moments}
    gathered = comm.gather_bytes(json.dumps(account).encode())
    with agreeing(comm, "--memory"), writing(f"--memory {path}", Path(path)):
        if gathered is not None:
            content = {"kinds": KINDS, "ranks": [json.loads(data) for data in gathered]}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def describe(config: TrainConfig, ranks: int, parameters: int, tokens: int, source: str) -> str:
    """Return the first lines of a run: the model and the data; the number of ranks and the flags of their layout."""
    model = config.model
    data = config.data
    kind = "GPT" if model.model == "gpt2" else model.model.title()
    heads = f" on {model.kv_heads} of keys and values" if model.kv_heads else ""
    heads += f", {model.experts} experts of which a token goes through {model.top_k}" if model.experts else ""
    words = []
    for section, field, flag, value in flags(config):
        if section == "mesh" and value != field.default:
            words.append(flag if value is True else f"{flag} {value}")
    layout = " ".join(words)
    several = "s" if ranks > 1 else ""
    microbatches = "1 microbatch" if data.microbatches == 1 else f"{data.microbatches} microbatches"
    return (
        f"minipar: {kind} with {parameters:,} parameters ({model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads{heads}, {config.run.dtype}) on {tokens:,} tokens of {printable(source)}\n"
        f"minipar: {ranks} rank{several}: {printable(layout)}, "
        f"global batch {data.global_batch} x {model.seq_len} tokens, "
        f"{microbatches} per replica, {config.run.reduction} reduction"
    )


def notes(config: TrainConfig) -> list[str]:
    """Warn about valid but wasteful settings of a resolved configuration: a line for each."""
    mesh = config.mesh
    m = config.data.microbatches
    stage = mesh.zero_stage
    replicas = (mesh.dp or 1) * mesh.cp
    shards = replicas // mesh.zero_replicas
    if mesh.etp is not None and mesh.experts_apart:
        shards = max(shards, replicas * mesh.tp // (mesh.ep * mesh.etp))  # edp: the experts are sharded
    lines = []
    if stage > 0 and shards == 1:
        groups = f" in {mesh.zero_replicas} replicas" if mesh.zero_replicas > 1 else ""
        lines.append(f"--zero-stage {stage} shards nothing: dp = {mesh.dp}{groups}")
    if stage == 3 and shards > 1 and m > 1:
        passes = f"each microbatch's forward and backward: 2*{m} = {2 * m} times per step"
        lines.append(f"--zero-stage 3 gathers parameters for {passes}")
    if stage >= 2 and shards > 1 and m > 1 and not mesh.sync_every_microbatch:
        line = f"{m} microbatches add up in whole gradients, which --zero-stage {stage} then shards"
        if mesh.pp == 1 and config.run.reduction != "tree":
            line += "; --sync-every-microbatch keeps them sharded and sends them each time"
        lines.append(line)
    if mesh.pp > 1 and (m == 1 or mesh.schedule == "naive"):
        why = "one microbatch" if m == 1 else "--schedule naive"
        lines.append(f"{why}: the pipeline's ranks work one after another")
    return [f"minipar: note: {line}" for line in lines]


def written(config: TrainConfig) -> str:
    """Return the files and directories that the run wrote, each path with its flag; "" if none."""
    run = config.run
    paths = {
        "--metrics": run.metrics,
        "--trace": run.trace,
        "--memory": run.memory,
        "--record": run.record,
        "--save": run.save,
        "--export": run.export,
    }
    texts = []
    for flag, path in paths.items():
        if path is not None and path != "-":
            texts.append(f"{printable(path)} ({flag})")
    return ", ".join(texts)
