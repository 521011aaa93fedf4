"""The program `mpirun -n N python -m minipar.train`: train a model; with --verify, prove it equal to one device's."""

import minipar.robust_start.first_import  # noqa: F401, I001 before the others, which take a second
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np

from minipar import backend
from minipar.comm.clock import Network
from minipar.comm.communicator import Communicator
from minipar.comm.launch import main
from minipar.comm.mesh import DeviceMesh
from minipar.comm.trace import save_chrome_trace, start_trace
from minipar.cli import say, writing
from minipar.errors import UsageError, printable
from minipar.memory import MemoryLedger
from minipar.nn.pretrained import load_config
from minipar.train import progress
from minipar.train.checkpoint import Checkpoint, agreeing
from minipar.train.resume import check_checkpoint, continued, find_checkpoint
from minipar.train.config import parse, resolve, with_shape
from minipar.train.settings import TrainConfig
from minipar.train.data import Evaluation, Tokens, hold_out, load_tokens
from minipar.train.evaluate import validation_loss
from minipar.train.lock import saving_alone
from minipar.train.precision import DIVERGED, is_finite
from minipar.train.progress import Metrics, Progress
from minipar.train.recording import Recorder
from minipar.train.trainer import StepResult, Trainer
from minipar.train.verify import Verifier


def run(comm: Communicator) -> int:
    """Run the whole job on every rank; return the exit code."""
    config = parse(sys.argv[1:], rank=comm.rank)
    with saving_alone(comm, config.run.save):
        return run_job(config, comm)


def run_job(config: TrainConfig, comm: Communicator) -> int:
    """Resume, train, and write the outputs of a parsed command line; return the exit code."""
    network = Network(*config.run.network) if any(config.run.network) else None
    comm = Communicator(comm.transport, clock=config.run.clock, network=network)
    checkpoint = find_checkpoint(config, comm)
    if checkpoint is not None:
        config = continued(config, checkpoint)
    config, tokens, evaluation = prepare(config, checkpoint, comm)
    run = config.run
    first_step = 0 if checkpoint is None else checkpoint.step
    with agreeing(comm, "minipar.train"):
        if comm.rank == 0:
            progress.prepare_outputs(config, first_step)
        metrics = Metrics(run.metrics if comm.rank == 0 else None, first_step)
    flags = config.mesh
    mesh = DeviceMesh(comm, dp=flags.dp, tp=flags.tp, pp=flags.pp, cp=flags.cp, ep=flags.ep, etp=flags.etp)
    ledger = MemoryLedger()
    out = progress.progress_stream(config, comm.rank)
    with ledger.recording() if run.memory is not None else nullcontext():
        with agreeing(comm, "--init-from"):
            trainer = Trainer(config, mesh, tokens, checkpoint)
        if run.record is not None:
            with agreeing(comm, "--record"):
                Recorder(trainer, run.record)
        verifier = Verifier(trainer) if run.verify else None
        report = Progress(config.optimizer.steps, out, done=first_step)
        with noting_signals(run.save is not None) as signals, report:
            train(trainer, evaluation, metrics, signals, report, verifier)
    if run.memory is not None:
        progress.save_ledgers(run.memory, ledger, comm)
    check_finite(trainer)
    if run.export is not None:
        export(trainer, run.export)
    files = progress.written(config)
    if files:
        say(f"minipar: wrote {files}", out)
    if verifier is None:
        return 0
    verdict = verifier.verdict()
    say(verdict.line, out)
    return 0 if verdict.passed else 1


def export(trainer: Trainer, directory: str) -> None:
    """Write the model as a directory, on rank 0.

    UsageError if a value is too large for `--export-dtype`.
    """
    run = trainer.config.run
    comm = trainer.mesh.world
    dtype = np.dtype(run.export_dtype or run.dtype)
    state = {name: values.astype(dtype, copy=False) for name, values in trainer.state_dict().items()}
    with agreeing(comm, "--export"):
        for name, values in state.items():
            if not np.isfinite(values).all():
                raise UsageError(f"--export: {name} has values that are too large for {dtype}")
        if comm.rank == 0:
            progress.write_export(trainer.model, directory, state)


@contextmanager
def noting_signals(saving: bool) -> Iterator[list[int]]:
    """Note the first SIGTERM or SIGINT in the list if a checkpoint can be saved.

    The second one ends the process.
    """
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    with ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGINT) if saving else ():
            handlers.callback(signal.signal, number, signal.signal(number, note))
        yield noted
    for late in noted:  # after the last step
        signal.raise_signal(late)


def train(
    trainer: Trainer,
    evaluation: Evaluation | None,
    metrics: Metrics,
    signals: list[int],
    report: Progress,
    verifier: Verifier | None = None,
) -> None:
    """Train, verify, report, save and trace. UsageError, unsaved, if a loss is not finite."""
    run = trainer.config.run
    comm = trainer.mesh.world
    say(opening(trainer), report.stream)
    if run.trace is not None:
        start_trace(comm)
    np.seterr(over="ignore", invalid="ignore")  # every rank would warn; the trainer says it once
    for result in trainer.train():
        if verifier is not None and not verifier.check_step(result):
            say(f"minipar: note: verify: FAILED: {verifier.failure}; training continues", report.stream)
        validation = evaluate(trainer, evaluation, result)
        metrics.write(result, validation)
        report(result, validation)
        if run.save is not None:
            save_if_due(trainer, run.save, result, signals, report)
    with agreeing(comm, "--metrics"):
        metrics.close()
    if run.trace is not None:
        with writing(f"--trace {run.trace}", Path(run.trace)):
            save_chrome_trace(run.trace, comm, trainer.mesh)


def opening(trainer: Trainer) -> str:
    """Return the lines that are printed before the first step."""
    config = trainer.config
    tokens = trainer.batches.tokens
    ranks = trainer.mesh.world.size
    lines = [progress.describe(config, ranks, trainer.size, len(tokens.ids), tokens.name)]
    lines += progress.notes(config)
    if trainer.checkpoint is not None:
        directory = printable(str(trainer.checkpoint.directory))
        line = f"minipar: resumed after step {trainer.first_step} from {directory}"
        if trainer.first_step >= config.optimizer.steps:
            line += "; this is the last step: give more --steps"
        lines.append(line)
    return "\n".join(lines)


def evaluate(trainer: Trainer, evaluation: Evaluation | None, result: StepResult) -> float | None:
    """Return the validation loss if it is due after this step.

    All ranks call it. UsageError if it is not finite.
    """
    config = trainer.config
    done = result.step + 1
    if evaluation is None or not is_due(done, config.optimizer.steps, config.data.eval_every):
        return None
    loss = validation_loss(trainer, evaluation)
    if not math.isfinite(loss):
        raise UsageError(DIVERGED.format(f"validation loss {loss} in step {done}", config.optimizer.lr))
    return loss


def save_if_due(trainer: Trainer, directory: str, result: StepResult, signals: list[int], report: Progress) -> None:
    """Save a checkpoint if it is due after this step.

    SystemExit if a rank has a signal, after saving. All ranks call it.
    """
    done = result.step + 1
    last = trainer.config.optimizer.steps
    noted = b"".join(trainer.mesh.world.all_gather_bytes(bytes(signals)))
    stop = max(noted, default=0)  # the same on every rank
    # A step that was skipped may be the first of a training that diverges: the last good checkpoint
    # stays.
    is_good = done == last or is_finite(result.loss, result.grad_norm)
    if stop or (is_good and is_due(done, last, trainer.config.run.save_every)):
        check_finite(trainer)
        trainer.save(directory, done)
    if stop:
        name = signal.Signals(stop).name
        say(f"minipar: {name}: saved step {done} in {printable(directory)}; --resume it", report.stream)
        raise SystemExit(128 + stop)


def check_finite(trainer: Trainer) -> None:
    """Raise UsageError on every rank if the last update made a value infinite or NaN: the loss is that before it."""
    optimizer = trainer.optimizer
    state = [*(p.data for p in optimizer.parameters), *optimizer.exp_avg, *optimizer.exp_avg_sq]
    finite = all(backend.xp.isfinite(array).all() for array in state)
    problem = "its last update made a parameter or a mean of the optimizer infinite or NaN"
    trainer.mesh.world.agree(None if finite else DIVERGED.format(problem, trainer.config.optimizer.lr))


def is_due(done: int, last: int, every: int | None) -> bool:
    """Return whether something is due after `done` of `last` steps: at the end, and every so many steps before."""
    return done == last or (every is not None and done % every == 0)


def prepare(
    config: TrainConfig, checkpoint: Checkpoint | None, comm: Communicator
) -> tuple[TrainConfig, Tokens, Evaluation | None]:
    """Fill in what files and the number of ranks decide, and check all of it.

    One rank's UsageError is every rank's.
    """
    with agreeing(comm, "minipar.train"):
        if config.model.init_from is not None:
            config = with_shape(config, load_config(config.model.init_from))
        config = resolve(config, comm.size)
        backend.use_device(config.run.device, comm.rank)
        try:
            tokens = load_tokens(config.data.path, vocab_size=config.model.vocab_size, seq_len=config.model.seq_len)
            tokens.check_separator(config.data.pack)
            tokens, evaluation = hold_out(config, tokens)
        except UsageError as error:
            flag = str(error).partition(" ")[0]
            name = {"--data": "data.path", "--eval-data": "data.eval_data"}.get(flag)
            if checkpoint is None or name is None or name in config.given:
                raise
            raise UsageError(f"{error}; {checkpoint.path} names this file: give {flag} with its new path") from None
    for flag, text in (("--data", tokens), ("--eval-data", evaluation.tokens if evaluation is not None else tokens)):
        if len(set(comm.all_gather_bytes(text.fingerprint()))) > 1:
            raise UsageError(f"{text.name} is not the same text on every rank; give {flag} a file that all hosts share")
    if checkpoint is not None:
        check_checkpoint(checkpoint, config, tokens, comm)
    return config, tokens, evaluation


if __name__ == "__main__":
    main(run)
