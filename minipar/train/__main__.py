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
from minipar.errors import UsageError, printable, writing
from minipar.memory import MemoryLedger
from minipar.nn.pretrained import load_config
from minipar.train import progress
from minipar.train.checkpoint import Checkpoint, agreeing, check_checkpoint, continued, find_checkpoint
from minipar.train.config import TrainConfig, parse, resolve, with_shape
from minipar.train.data import Evaluation, Tokens, hold_out, load_tokens
from minipar.train.lock import saving_alone
from minipar.train.progress import Metrics, Progress, say
from minipar.train.trainer import DIVERGED, Trainer
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
    first_step = 0 if checkpoint is None else checkpoint.step
    with agreeing(comm, "minipar.train"):
        if comm.rank == 0:
            progress.prepare_outputs(config, first_step)
        metrics = Metrics(config.run.metrics if comm.rank == 0 else None, first_step)
    mesh = DeviceMesh(comm, **{axis: getattr(config.mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep")})
    ledger = MemoryLedger()
    out = progress.progress_stream(config, comm.rank)
    with ledger.recording() if config.run.memory is not None else nullcontext():
        with agreeing(comm, "--init-from"):
            trainer = Trainer(config, mesh, tokens, checkpoint)
        if config.run.record is not None:
            with agreeing(comm, "--record"):
                trainer.start_record(config.run.record)
        verifier = Verifier(trainer) if config.run.verify else None
        report = Progress(config.optimizer.steps, out, done=first_step)
        with noting_signals(config.run.save is not None) as signals, report:
            train(trainer, evaluation, metrics, signals, report, verifier)
    if config.run.memory is not None:
        progress.save_ledgers(config.run.memory, ledger, comm)
    check_finite(trainer)
    if config.run.export is not None:
        dtype = np.dtype(config.run.export_dtype or config.run.dtype)
        state = {name: values.astype(dtype, copy=False) for name, values in trainer.state_dict().items()}
        with agreeing(comm, "--export"):
            for name, values in state.items():
                if not np.isfinite(values).all():
                    raise UsageError(f"--export: {name} has values that are too large for {dtype}")
            if comm.rank == 0:
                progress.write_export(trainer.model, config.run.export, state)
    if files := progress.written(config):
        say(f"minipar: wrote {files}", out)
    if verifier is None:
        return 0
    verdict = verifier.verdict()
    say(verdict.line, out)
    return 0 if verdict.passed else 1


@contextmanager
def noting_signals(saving: bool) -> Iterator[list[int]]:
    """Note the first SIGTERM or SIGINT in the list if a checkpoint can be saved. The second one ends the process."""
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
    config, comm, tokens = trainer.config, trainer.mesh.world, trainer.batches.tokens
    out = report.stream
    lines = [progress.describe(config, comm.size, trainer.size, len(tokens.ids), tokens.name), *progress.notes(config)]
    if trainer.checkpoint is not None:
        rest = "" if trainer.first_step < config.optimizer.steps else "; this is the last step: give more --steps"
        place = printable(str(trainer.checkpoint.directory))
        lines.append(f"minipar: resumed after step {trainer.first_step} from {place}{rest}")
    say("\n".join(lines), out)
    if config.run.trace is not None:
        start_trace(comm)
    np.seterr(over="ignore", invalid="ignore")  # every rank would warn; the check below says it once
    for result in trainer.train():
        done, last = result.step + 1, config.optimizer.steps
        if verifier is not None and not verifier.check(result):
            say(f"minipar: note: verify: FAILED: {verifier.failure}; training continues", out)
        validation = None
        if evaluation is not None and is_due(done, last, config.data.eval_every):
            validation = trainer.validation_loss(evaluation)
        if validation is not None and not math.isfinite(validation):
            raise UsageError(DIVERGED.format(f"validation loss {validation} in step {done}", config.optimizer.lr))
        metrics.write(result, validation)
        report(result, validation)
        if config.run.save is not None:
            stop = max(b"".join(comm.all_gather_bytes(bytes(signals))), default=0)  # the same on every rank
            # A step that was skipped may be the first of a training that diverges: the last good checkpoint stays.
            good = done == last or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
            if stop or (good and is_due(done, last, config.run.save_every)):
                check_finite(trainer)
                trainer.save(config.run.save, done)
            if stop:
                place, name = printable(config.run.save), signal.Signals(stop).name
                say(f"minipar: {name}: saved step {done} in {place}; --resume it", out)
                raise SystemExit(128 + stop)
    with agreeing(comm, "--metrics"):
        metrics.close()
    if config.run.trace is not None:
        with writing(f"--trace {config.run.trace}", Path(config.run.trace)):
            save_chrome_trace(config.run.trace, comm, trainer.mesh)


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
    """Fill in what files and the number of ranks decide, and check all of it. One rank's UsageError is every rank's."""
    with agreeing(comm, "minipar.train"):
        if (directory := config.model.init_from) is not None:
            config = with_shape(config, load_config(directory))
        config = resolve(config, comm.size)
        backend.use_device(config.run.device, comm.rank)
        try:
            tokens = load_tokens(config.data.path, vocab_size=config.model.vocab_size, seq_len=config.model.seq_len)
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
