"""The program `mpirun -n N python -m minipar.train`: train a model; with --verify, prove it equal to one device's."""

import json
import os
import signal
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from minipar.backend import use_device
from minipar.comm import Communicator, DeviceMesh, Network, save_chrome_trace, start_trace
from minipar.comm.launch import launch
from minipar.compare.recorder import Recorder
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.memory_file import save_ledgers
from minipar.train import checkpoint
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.pretrained import save_pretrained
from minipar.train.scaled_trainer import ScaledTrainer
from minipar.train.trainer import StepResult, Trainer
from minipar.train.tree_trainer import TreeTrainer
from minipar.train.verify import verify


def run(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Train as the command line says, and write what it asks for. Return the exit code: 1 if `--verify` fails."""
    args = parse(argv, world.size, prints=world.rank == 0)
    network = Network(*args.network) if args.network else None
    # The same ranks, with the clock and the network of the flags.
    world = Communicator(world.transport, clock=args.clock, network=network)
    use_device(args.device)
    ledger = MemoryLedger()
    with ledger.recording() if args.memory else nullcontext():
        trainer, held_out = make_trainer(args, world)
        results = train(trainer, held_out)
    if args.memory:
        save_ledgers(args.memory, ledger, world)
    if args.export:
        state = trainer.state_dict()
        for name, values in state.items():
            checkpoint.check_finite(name, values)
        if state:
            save_pretrained(trainer.model, args.export, state)
    if not args.verify:
        return 0
    verdict = verify(trainer, results)
    say(world, verdict.line)
    return int(not verdict.passed)


def make_trainer(args: Namespace, world: Communicator) -> tuple[Trainer, np.ndarray | None]:
    """Make the trainer, resumed, and the samples that it is evaluated on. UsageError for what cannot run."""
    tokens = load_tokens(args.data, args.vocab_size, args.seq_len)
    held_out = None
    if args.eval_every:
        tokens, held_out = tokens.hold_out(args.seq_len)
    kind = ScaledTrainer if args.dtype == "float16" else Trainer
    if args.reduction == "tree":
        kind = TreeTrainer
    mesh = DeviceMesh(world, dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
    trainer = kind(args, mesh, tokens)
    if args.resume:
        checkpoint.resume(trainer, args.resume)
    if args.save:
        checkpoint.refuse_later(args.save, trainer.first_step)
    prepare_outputs(args)  # last, so that a run which is refused harms no file
    return trainer, held_out


def prepare_outputs(args: Namespace) -> None:
    """Make the directories and files that the run will write. UsageError if it cannot. All ranks call it."""
    try:
        for path in filter(None, (args.save, args.export)):
            os.makedirs(path, exist_ok=True)
        for path in filter(None, (args.metrics, args.trace, args.memory)):
            open(path, "a" if args.resume else "w").close()
    except OSError as error:
        raise UsageError(str(error)) from None


def train(trainer: Trainer, held_out: np.ndarray | None) -> list[StepResult]:
    """Take the steps that are left; after each, report, record and save. Return the results."""
    args = trainer.args
    world = trainer.mesh.world
    take_step = Recorder(trainer, args.record).step if args.record else trainer.step
    say(world, opening(trainer))
    if args.trace:
        start_trace(world)
    np.seterr(all="ignore")  # every rank would warn; the trainer stops at what is not finite
    results = []
    signals = noted_signals() if args.save else []
    spoken = 0.0  # when the last line was printed
    for step in range(trainer.first_step, args.steps):
        start = time.monotonic()
        result = take_step(step)
        results.append(result)
        now = time.monotonic()
        row = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "tokens_per_second": trainer.tokens_per_step / (now - start),
        }
        is_shown = is_due(step, args.steps, args.eval_every)
        if held_out is not None and is_shown:
            row["eval_loss"] = trainer.validation_loss(held_out)
        if args.metrics and world.rank == 0:
            with open(args.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if is_shown or now - spoken > 5:
            left = (now - start) * (args.steps - step - 1)
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
    sizes = f"{args.layers} layers, hidden {args.hidden}, {args.heads} heads, {args.dtype}"
    model = f"{args.shape.model_type} with {sum(trainer.sizes.values()):,} parameters ({sizes})"
    mesh = f"dp {args.dp}, tp {args.tp}, pp {args.pp}, cp {args.cp}, ep {args.ep}, ZeRO stage {args.zero_stage}"
    batch = f"global batch {args.global_batch} x {args.seq_len} tokens, microbatches per replica: {args.microbatches}"
    return (
        f"minipar: {model} on {len(trainer.batches.tokens.ids):,} tokens of {trainer.batches.tokens.name}\n"
        f"minipar: {mesh}; {batch}; from step {trainer.first_step + 1} on"
    )


def line(row: dict[str, float], steps: int, left: float) -> str:
    """Return a line of progress; `left` are the seconds until the end."""
    text = f"step {row['step'] + 1:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}"
    text += f"  grad norm {row['grad_norm']:.3f}  {row['tokens_per_second']:,.0f} tokens/s  {left / 60:.1f} min left"
    if "eval_loss" in row:
        text += f"  eval loss {row['eval_loss']:g}"
    return text


def say(world: Communicator, text: str) -> None:
    """Print on rank 0, at once."""
    if world.rank == 0:
        print(text, flush=True)


def noted_signals() -> list[int]:
    """Return the list in which SIGTERM and Ctrl-C are noted from now on; the same one again ends the process."""
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
    raise SystemExit(launch(run))
