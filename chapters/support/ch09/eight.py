"""Run layouts on eight ranks: train and write (9.3), trace (9.4), time (9.5), stop and resume (9.6), mistakes (9.7).

A layout is given as flags of the command line. `on_eight` runs a function on eight ranks: on those of mpirun if it
started eight, else on eight threads of rank 0. Results are JSON's, so that they can be gathered.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from chapters.support.instruments import digest, same_on_all_ranks
from chapters.support.share_work import from_all, shared
from chapters.support.training import make_trainer, parsed, step_traffic, trainer_for
from chapters.support.whole_runs import relative_difference, verdict_of
from minipar.comm import Communicator, DeviceMesh, ModelClock, Network, run_local, serial
from minipar.compare.recorder import Recorder
from minipar.generate import generate
from minipar.parallel.placement import Shard
from minipar.parallel.state import owned_pieces
from minipar.train import checkpoint
from minipar.train.data import Tokens, load_tokens
from minipar.train.pretrained import load_pretrained, save_pretrained
from minipar.train.trainer import StepResult, Trainer

AXES = ("tp", "dp", "pp")
STEPS, SAVED_AFTER = 5, 3
SHAPE = "--layers 4 --hidden 32 --heads 8 --seq-len 16 --vocab-size 256 --dtype float64 --lr 3e-3"
TRAINING = f"{SHAPE} --reduction ordered --clip-grad 0.5"
TOKENS = load_tokens(None, vocab_size=256, seq_len=16)


def on_eight(comm: Communicator, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run work(comm, *arguments) on eight ranks. Return what each of them returned on rank 0, elsewhere nothing."""
    if comm.size == 8:
        results = from_all(comm, work(comm, *arguments))
    elif comm.rank == 0:
        results = run_local(8, work, *arguments)
    return results if comm.rank == 0 else []


def layout_of(size: int) -> str:
    """Return the flags of the layout that the chapter trains on any number of ranks: what divides it."""
    tp = 2 if size % 2 == 0 else 1
    if size % 4 == 0:
        pp = 2
    elif size % 3 == 0:
        pp = 3
    else:
        pp = 1
    dp = size // (tp * pp)
    flags = f"--dp {dp} --tp {tp} --pp {pp} --microbatches {2 * pp} --global-batch {2 * pp * dp}"
    return flags + (" --sequence-parallel" if tp > 1 else "")


def args_of(flags: str, ranks: int, steps: int = STEPS) -> Namespace:
    """Return the flags of the chapter's training in a layout given as flags, read."""
    return parsed(f"{TRAINING} --steps {steps} {flags}", ranks)


def trainer_on(
    comm: Communicator, flags: str, steps: int = STEPS, kind: type[Trainer] = Trainer, mesh: Any = DeviceMesh
) -> Trainer:
    """Return this rank's trainer for a layout given as flags."""
    args = args_of(flags, comm.size, steps)
    trainer = kind(args, mesh(comm, dp=args.dp, tp=args.tp, pp=args.pp), TOKENS)
    if args.resume:
        checkpoint.resume(trainer, args.resume)
    return trainer


def counted_step(comm: Communicator, trainer: Trainer, step: int = 0) -> tuple[StepResult, dict[str, int]]:
    """Take a step; return its result and the bytes that this rank sent in it, by axis."""
    comm.traffic.reset()
    result = trainer.step(step)
    return result, {axis: comm.traffic.bytes(axis=axis) for axis in (*AXES, "cp")}


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SingleDevice:
    """The training of one device that takes the whole batch at once: each step's result and the parameters after it."""

    results: list[StepResult]
    states: list[dict[str, np.ndarray]]


def single_device(flags: str, steps: int = STEPS) -> SingleDevice:
    """Train on one device."""
    trainer, results, states = trainer_on(serial(), flags, steps), [], []
    for step in range(steps):
        results.append(trainer.step(step))
        states.append(trainer.state_dict())
    return SingleDevice(results, states)


def train(comm: Communicator, flags: str, single: SingleDevice | None) -> dict[str, Any]:
    """Train a layout; each rank returns the bytes that it sent in step 0, rank 0 also the comparison with `single`."""
    trainer, results, states, sent = trainer_on(comm, flags), [], [], {}
    for step in range(STEPS):
        result, bytes_of_step = counted_step(comm, trainer, step)
        sent = sent or bytes_of_step
        results.append(result)
        states.append(trainer.state_dict())
    if comm.rank != 0:
        return {"sent": sent}
    assert single is not None
    differences = []
    for mine, alone in zip(states, single.states, strict=True):
        differences.append(max(relative_difference(mine[name], alone[name]) for name in alone))
    verdict = verdict_of((states[-1], results), (single.states[-1], single.results), 8)
    losses = [result.loss for result in results]
    outcome = {"losses": losses, "differences": differences, "bits": digest(states[-1].values())}
    return outcome | {"sent": sent, "passed": verdict.passed, "verdict": verdict.line}


def curves(runs: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[list[float], list[float]]]:
    """Return each layout's losses and its differences to one device after each step, from what `train` returned."""
    return {label: (first["losses"], first["differences"]) for label, (first, *_) in runs.items()}


def traced_step(comm: Communicator, flags: str) -> list[dict[str, Any]]:
    """Return the events of one step on this rank, in Chrome's trace format."""
    comm = Communicator(comm.transport, clock="model")
    trainer = trainer_on(comm, flags)
    comm.tracer.enabled = True
    trainer.step(0)
    return comm.tracer.chrome_events(comm.rank)


def one_trace(ranks: Iterable[Iterable[dict[str, Any]]]) -> dict[str, Any]:
    """Join the events of all ranks of dp 2 x tp 2 x pp 2 into one trace."""
    about = {"clock": "model", "mesh": {"pp": 2, "dp": 2, "tp": 2}}
    return {"traceEvents": [event for events in ranks for event in events], "otherData": about}


def record(comm: Communicator, kind: type[Trainer], directory: str) -> list[float]:
    """Record 50 steps of dp 2 x tp 4 without clipping, as `--record` does; return the losses. Rank 0 writes."""
    trainer = trainer_on(comm, "--dp 2 --tp 4 --sequence-parallel --layers 2 --global-batch 16 --clip-grad 0", 50, kind)
    recorder = Recorder(trainer, directory)
    return [recorder.step(step).loss for step in range(50)]


SENTENCE = b"The big dwarf only jumps. "
WRITER = "--layers 2 --hidden 32 --heads 4 --seq-len 16 --vocab-size 256 --dtype float64 --lr 1e-2 --global-batch 8"


def learn(comm: Communicator, flags: str, steps: int, directory: str) -> float:
    """Train on SENTENCE, over and over, and write a model directory; return the last loss."""
    args = parsed(f"{WRITER} --steps {max(steps, 1)} {flags}", comm.size)
    trainer = trainer_for(comm, args, Tokens(np.frombuffer(100 * SENTENCE, np.uint8), "a sentence"))
    results = [trainer.step(step) for step in range(steps)]
    state = trainer.state_dict()
    if comm.rank == 0:
        save_pretrained(trainer.model, directory, state)
    return results[-1].loss if results else float("nan")


def text_of(directory: str, count: int = 60) -> str:
    """Return what the model of a directory writes after "The": at each place the likeliest byte."""
    prompt = list(b"The")
    written = generate(load_pretrained(directory), prompt, count, temperature=0.0, seed=0)
    return bytes(written).decode(errors="replace")


def stop_and_save(comm: Communicator, flags: str, directory: str) -> None:
    """Train SAVED_AFTER steps and save a checkpoint; when this returns, it is there for all ranks."""
    trainer = trainer_on(comm, flags)
    for step in range(SAVED_AFTER):
        trainer.step(step)
    checkpoint.save(trainer, directory, SAVED_AFTER)
    comm.barrier()


def pieces_of(comm: Communicator, flags: str, name: str) -> list[dict[str, Any]]:
    """Return which pieces of the serial model's parameter `name` this rank owns in a layout given as flags."""
    owned = owned_pieces(trainer_on(comm, flags).optimizer.parameters)
    return [asdict(piece) for _, piece, _ in owned if piece.name == name]


def shared_directory(comm: Communicator) -> tuple[str, ExitStack]:
    """Make a temporary directory for all ranks. Return its path, and what removes it on rank 0 when it is closed."""
    stack = ExitStack()
    name = stack.enter_context(TemporaryDirectory()) if comm.rank == 0 else ""
    return comm.all_gather_bytes(name.encode())[0].decode(), stack


def resumed(comm: Communicator, flags: str, directory: str) -> Trainer:
    """Return this rank's trainer, which continues from a checkpoint in a layout of its own."""
    return trainer_on(comm, f"{flags} --resume {directory}")


def move(
    comm: Communicator, before: str, after: str, directory: str, single: SingleDevice | None
) -> dict[str, Any] | None:
    """Train in one layout, resume in another; rank 0 returns the comparison with a single device that never stopped."""
    stop_and_save(comm, before, directory)
    trainer = resumed(comm, after, directory)
    results = list(trainer.train())
    state = trainer.state_dict()
    if comm.rank != 0:
        return None
    assert single is not None
    verdict = verdict_of((state, results), (single.states[-1], single.results), 8)
    return {"passed": verdict.passed, "verdict": verdict.line, "bits": digest(state.values())}


# ---- the time of a step, with one axis between the hosts -------------------------------------------------------------

# Every length stands for one SCALE times as long: bytes for SCALE**2 as many, products for SCALE**3 as many operations.
# The program sends float32; what it stands for has 16 bit.
SCALE, SPEED = 64, 400e12
LINKS = {  # seconds per message, bytes per second
    "NVLink": (3e-6, 450e9),
    "InfiniBand": (5e-6, 50e9),
    "Ethernet": (30e-6, 12.5e9),
}
DISTANCES = {1: "tp", 2: "dp", 4: "pp"}  # between the two ranks of a row of dp 2 x tp 2 x pp 2
SCALED = "--layers 2 --hidden 96 --heads 8 --seq-len 32 --vocab-size 256 --dp 2 --tp 2 --pp 2"


def real_bytes(nbytes: float) -> float:
    """Return the bytes that the scale model's stand for."""
    return nbytes * SCALE**2 * (2 / 4)


@dataclass(frozen=True)
class AxisNetwork(Network):
    """A link for each axis: `link` for axis `slow`, NVLink for the others."""

    slow: str | None = None
    link: str = "NVLink"

    def seconds(self, nbytes: int, source: int, dest: int) -> float:
        """Price a message by the axis of the two ranks."""
        axis = DISTANCES[abs(source - dest)]
        alpha, speed = LINKS[self.link if axis == self.slow else "NVLink"]
        return alpha + real_bytes(nbytes) / speed


@dataclass(frozen=True)
class Job:
    """One step of the scale model, with one axis on another link than NVLink."""

    slow: str | None
    link: str
    microbatches: int
    traced: bool = False


@dataclass(frozen=True)
class Timing:
    """The seconds of a step on the model clock, rank 0's traffic by axis, and all ranks' events if traced."""

    seconds: float
    traffic: dict[str, tuple[float, int]]
    events: list[dict[str, Any]]


def _scaled_step(comm: Communicator, job: Job) -> tuple[float, dict[str, tuple[float, int]], list[dict[str, Any]]]:
    flags = f"{SCALED} --microbatches {job.microbatches} --global-batch {2 * job.microbatches}"
    trainer = make_trainer(comm, flags)
    comm.traffic.reset()
    comm.tracer.enabled = job.traced
    trainer.step(0)
    traffic = {a: (real_bytes(comm.traffic.bytes(axis=a)), comm.traffic.messages(axis=a)) for a in AXES}
    return comm.clock.now(), traffic, comm.tracer.chrome_events(comm.rank) if job.traced else []


def _time(job: Job) -> list[Any]:
    """Return the seconds of a job, the traffic of rank 0, and the events of all ranks."""
    network = AxisNetwork(slow=job.slow, link=job.link)
    ranks = run_local(8, _scaled_step, job, clock=partial(ModelClock, SPEED / SCALE**3), network=network)
    events = [event for _, _, own in ranks for event in own]
    return [max(seconds for seconds, _, _ in ranks), ranks[0][1], events]


def simulate(comm: Communicator, jobs: list[Job]) -> dict[Job, Timing]:
    """Time each job on eight threads; the ranks share the jobs, and all of them have the timings."""
    timings = shared(comm, _time, [(job,) for job in jobs])
    return {job: Timing(*timing) for job, timing in zip(jobs, timings, strict=True)}


def one_after_another(timings: Iterable[Timing], ranks: Iterable[int]) -> dict[str, Any]:
    """Join traced steps into one trace of the given ranks."""
    events, begin, ranks = [], 0.0, set(ranks)
    for timing in timings:
        for event in timing.events:
            if event["pid"] in ranks and event["ph"] in "MX":
                events.append(event | ({"ts": event["ts"] + begin} if "ts" in event else {}))
        begin += 1e6 * timing.seconds
    return {"traceEvents": events, "otherData": {"clock": "model"}}


# ---- mistakes --------------------------------------------------------------------------------------------------------

SMALL = "--dp 2 --tp 2 --pp 2 --microbatches 2 --global-batch 4"


def examine(comm: Communicator, kind: type[Trainer], mesh: Any, single: SingleDevice | None) -> list[str]:
    """Take two steps of dp 2 x tp 2 x pp 2; return the names of the instruments that noticed a mistake on this rank.

    loss        the last loss is off by more than 5 % (rank 0)
    ranks       ranks that should hold the same values do not: over dp all, over tp what is not cut
    bytes       the bytes of an axis are not those of the formula
    one device  parameters, losses or norms are not those of one device (rank 0)
    """
    trainer = trainer_on(comm, SMALL, 2, kind, mesh)
    first, sent = counted_step(comm, trainer)
    results = [first, trainer.step(1)]
    place = trainer.mesh.coordinates
    rank = (place["pp"] * 2 + place["dp"]) * 2 + place["tp"]  # the rank that has this place where tp is innermost
    parameters = trainer.ddp.parameters()
    whole = [p.data for p in parameters if not isinstance(p.placement.tp, Shard)]
    dp_alike = same_on_all_ranks(trainer.mesh.dp, *(p.data for p in parameters))
    tp_alike = same_on_all_ranks(trainer.mesh.tp, *whole)
    noticed = {"ranks": not (dp_alike and tp_alike), "bytes": sent != step_traffic(trainer.args, rank)}
    state = trainer.state_dict()
    if comm.rank == 0:
        assert single is not None
        verdict = verdict_of((state, results), (single.states[-1], single.results), 8)
        noticed["loss"] = abs(results[-1].loss / single.results[-1].loss - 1) > 0.05
        noticed["one device"] = not verdict.passed
    return [instrument for instrument, did in noticed.items() if did]
