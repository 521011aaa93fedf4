"""The program `mpirun -n N python -m minipar.train`: train a model; with --verify, prove it equal to one device's."""

import minipar.robust_start.first_import  # noqa: F401, I001 before the others, which take a second
import json
import os
import signal
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta

import numpy as np

from minipar.backend import use_device
from minipar.comm.clock import Network
from minipar.comm.communicator import Communicator
from minipar.comm.launch import main
from minipar.comm.mesh import DeviceMesh
from minipar.comm.trace import save_chrome_trace, start_trace
from minipar.compare.recorder import Recorder
from minipar.errors import UsageError, printable
from minipar.memory import MemoryLedger
from minipar.train import checkpoint
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.pretrained import save_pretrained
from minipar.train.scaled_trainer import ScaledTrainer
from minipar.train.trainer import StepResult, Trainer
from minipar.train.tree_trainer import TreeTrainer
from minipar.train.verify import verify

PROGRESS_SECONDS = 5.0  # between two lines


def run(world: Communicator) -> int:
    """Run the whole job on every rank; return the exit code."""
    return run_job(parse(sys.argv[1:], world.size, prints=world.rank == 0), world)


def run_job(args: Namespace, world: Communicator) -> int:
    """Train, and write what the flags ask for; return the exit code: 1 if `--verify` fails."""
    network = Network(*args.network) if args.network else None
    world = Communicator(world.transport, clock=args.clock, network=network)
    use_device(args.device, world.rank)
    ledger = MemoryLedger()
    with ledger.recording() if args.memory else nullcontext():
        trainer, held_out = make_trainer(args, world)
        results = train(trainer, held_out)
    if args.memory:
        ledger.save(args.memory, world)
    if args.export:
        state = {name: values.astype(args.dtype) for name, values in trainer.state_dict().items()}
        if state:
            for name, values in state.items():
                checkpoint.check_finite(name, values)
            save_pretrained(trainer.model, args.export, state)
    if not args.verify:
        return 0
    verdict = verify(trainer, results)
    say(world, verdict.line)
    return 0 if verdict.passed else 1


def make_trainer(args: Namespace, world: Communicator) -> tuple[Trainer, np.ndarray | None]:
    """Make the trainer, resumed, and the samples that it is evaluated on. UsageError, before hours of training."""
    problem = None
    try:
        tokens = load_tokens(args.data, args.vocab_size, args.seq_len)
        if world.rank == 0:
            for path in filter(None, (args.save, args.export)):
                os.makedirs(path, exist_ok=True)
            for path in filter(None, (args.metrics, args.trace, args.memory)):
                open(path, "a" if args.resume else "w").close()
    except (UsageError, OSError) as error:
        problem = printable(str(error))
    world.agree(problem)  # a host may lack a file
    held_out = None
    if args.eval_every:
        tokens, held_out = tokens.hold_out(args.seq_len)
    if len(set(world.all_gather_bytes(tokens.fingerprint().encode()))) > 1:
        remedy = "give --data a file that all hosts share"
        raise UsageError(f"{tokens.name} is not the same text on every rank; {remedy}")
    kind = ScaledTrainer if args.dtype == "float16" else Trainer
    if args.reduction == "tree":
        kind = TreeTrainer
    mesh = DeviceMesh(world, dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
    trainer = kind(args, mesh, tokens)
    if args.resume:
        checkpoint.resume(trainer, args.resume)
    if args.save:
        checkpoint.refuse_later(args.save, trainer.first_step)
    return trainer, held_out


def train(trainer: Trainer, held_out: np.ndarray | None) -> list[StepResult]:
    """Take the steps that are left; after each, report, record and save. Return the results."""
    args = trainer.args
    world = trainer.mesh.world
    take_step = Recorder(trainer, args.record).step if args.record else trainer.step
    say(world, opening(trainer))
    if args.trace:
        start_trace(world)
    np.seterr(over="ignore", invalid="ignore")  # every rank would warn; the trainer says it once
    results = []
    signals = noted_signals() if args.save else []
    started = spoken = time.monotonic()
    for step in range(trainer.first_step, args.steps):
        start = time.monotonic()
        result = take_step(step)
        results.append(result)
        now = time.monotonic()
        row = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm}
        row["tokens_per_second"] = trainer.tokens_per_step / (now - start)
        if held_out is not None and is_due(step, args.steps, args.eval_every):
            row["eval_loss"] = trainer.validation_loss(held_out)
        if args.metrics and world.rank == 0:
            with open(args.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        is_end = step in (trainer.first_step, args.steps - 1)
        if is_end or "eval_loss" in row or now - spoken > PROGRESS_SECONDS:
            average = (now - started) / (step + 1 - trainer.first_step)
            left = average * (args.steps - step - 1)
            say(world, line(row, args.steps, left))
            spoken = now
        if args.save:
            save_if_due(trainer, step, signals)
    if args.trace:
        save_chrome_trace(args.trace, world, trainer.mesh)
    return results


def is_due(step: int, steps: int, every: int | None) -> bool:
    """Return whether something is due after a step: at the end, and every so many steps before."""
    return step + 1 == steps or (every is not None and (step + 1) % every == 0)


def opening(trainer: Trainer) -> str:
    """Return the lines before the first step."""
    args = trainer.args
    tokens = trainer.batches.tokens
    sizes = f"{args.layers} layers, hidden {args.hidden}, {args.heads} heads, {args.dtype}"
    model = f"{args.shape.model_type} with {sum(trainer.sizes.values()):,} parameters ({sizes})"
    mesh = f"dp {args.dp}, tp {args.tp}, pp {args.pp}, cp {args.cp}, ep {args.ep}, ZeRO stage {args.zero_stage}"
    batch = f"global batch {args.global_batch} x {args.seq_len} tokens, {args.microbatches} microbatches per replica"
    return (
        f"minipar: {model} on {len(tokens.ids):,} tokens of {printable(tokens.name)}\n"
        f"minipar: {mesh}; {batch}; from step {trainer.first_step + 1} on"
    )


def line(row: dict[str, float], steps: int, left: float) -> str:
    """Return a line of progress; `left` are the seconds until the end."""
    text = f"step {row['step'] + 1:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}"
    text += f"  grad norm {row['grad_norm']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
    if left >= 1:
        text += f"  {timedelta(seconds=round(left))} left"
    if "eval_loss" in row:
        text += f"  eval loss {row['eval_loss']:g}"
    return text


def say(world: Communicator, text: str) -> None:
    """Print on rank 0, at once."""
    if world.rank == 0:
        print(text, flush=True)


def noted_signals() -> list[int]:
    """Return the list in which SIGTERM and Ctrl-C are noted from now on; a second one ends the process."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return noted


def save_if_due(trainer: Trainer, step: int, signals: list[int]) -> None:
    """Save a checkpoint if it is due, or if a rank has a signal: then SystemExit on all ranks, after saving."""
    args = trainer.args
    world = trainer.mesh.world
    noted = max(b"".join(world.all_gather_bytes(bytes(signals))), default=0)  # the same on every rank
    if noted or is_due(step, args.steps, args.save_every):
        checkpoint.save(trainer, args.save, step + 1)
    if noted:
        name = signal.Signals(noted).name
        say(world, f"minipar: {name}: saved step {step + 1}; go on with --resume {args.save}")
        raise SystemExit(128 + noted)


if __name__ == "__main__":
    main(run)
