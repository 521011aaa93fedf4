"""mpirun -n N python -m minipar.train: train a GPT; with --verify, prove the result equal to one device's."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext

import numpy as np

from minipar import backend
from minipar.comm import Communicator, DeviceMesh, Network, main, save_chrome_trace, start_trace
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn.pretrained import export_gpt2, load_config
from minipar.train.checkpoint import agreeing, prepare_directory
from minipar.train.config import TrainConfig, parse, prepare_outputs, progress_stream, resolve, with_shape
from minipar.train.data import Tokens, load_tokens
from minipar.train.manifest import Checkpoint
from minipar.train.progress import Metrics, Progress, describe, notes, save_ledgers, written
from minipar.train.resume import open_checkpoint
from minipar.train.trainer import StepResult, Trainer
from minipar.train.verify import verify


def run(comm: Communicator) -> int:
    """The whole job on every rank; returns the exit code."""
    config = parse(sys.argv[1:], rank=comm.rank)
    network = Network(*config.run.network) if any(config.run.network) else None
    comm = Communicator(comm.transport, clock=config.run.clock, network=network)
    config, tokens = prepare(config, comm)
    checkpoint = open_checkpoint(config, tokens, comm)
    prepare_saving(config, comm, 0 if checkpoint is None else checkpoint.step)
    mesh = DeviceMesh(comm, dp=config.mesh.dp, tp=config.mesh.tp, pp=config.mesh.pp)
    ledger = MemoryLedger() if config.run.memory is not None else None
    with ledger.recording() if ledger is not None else nullcontext():
        trainer = build(config, mesh, tokens, checkpoint)
        results = train(config, trainer, tokens)
    if ledger is not None and config.run.memory is not None:
        save_ledgers(config.run.memory, ledger, comm)
    if config.run.export is not None:
        state = trainer.state_dict()
        if comm.rank == 0:
            export_gpt2(trainer.model, config.run.export, state)
    out = progress_stream(config) if comm.rank == 0 else None
    if out is not None and (files := written(config)):
        print(f"minipar: wrote {files}", file=out, flush=True)
    if not config.run.verify:
        return 0
    verdict = verify(trainer, results, tokens, Progress("one device, step", config.optimizer.steps, out))
    if out is not None:
        print(verdict.line, file=out, flush=True)
    return 0 if verdict.passed else 1


def train(config: TrainConfig, trainer: Trainer, tokens: Tokens) -> list[StepResult]:
    """All steps, reported on rank 0, saved and traced where asked for; UsageError when the loss is not finite any more
    (what is not finite is not saved).
    """
    comm = trainer.mesh.world
    out = progress_stream(config) if comm.rank == 0 else None
    if out is not None:
        print(describe(config, comm.size, trainer.size, len(tokens.ids), tokens.name), file=out, flush=True)
        for note in notes(config, trainer.model.config.n_positions):
            print(note, file=out, flush=True)

        if trainer.checkpoint is not None:
            print(f"minipar: resumed after step {trainer.first_step} from {trainer.checkpoint.directory}", file=out)

    metrics = Metrics(config.run.metrics if comm.rank == 0 else None, trainer.first_step)
    progress = Progress("step", config.optimizer.steps, out)
    if config.run.trace is not None:
        start_trace(comm)
    results = []
    np.seterr(over="ignore", invalid="ignore")  # every rank would warn; the check below says it once
    for result in trainer.train():
        results.append(result)
        metrics.write(result)
        progress(result)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise UsageError(
                f"training has diverged: loss {result.loss} and gradient norm {result.grad_norm} in step "
                f"{result.step + 1}; try a smaller --lr than {config.optimizer.lr:g}, --warmup-steps or --clip-grad"
            )
        done, every = result.step + 1, config.run.save_every
        if config.run.save is not None and (done == config.optimizer.steps or (every and done % every == 0)):
            trainer.save(config.run.save, done)
    metrics.close()
    if config.run.trace is not None:
        save_chrome_trace(config.run.trace, comm, trainer.mesh)
    return results


def prepare(config: TrainConfig, comm: Communicator) -> tuple[TrainConfig, Tokens]:
    """Fill in what the files and the number of ranks decide, and check all of it on every rank together.

    What one rank alone can find wrong (a file that its host lacks) becomes every rank's UsageError through `agree`.
    """
    error, tokens = None, None
    try:
        if config.model.init_from is not None:
            shape = load_config(config.model.init_from)
            config = with_shape(
                config,
                layers=shape.n_layer,
                hidden=shape.n_embd,
                heads=shape.n_head,
                vocab_size=shape.vocab_size,
                positions=shape.n_positions,
            )
        config = resolve(config, comm.size)
        backend.use_device(config.run.device, comm.rank)
        tokens = load_tokens(config.data.path, vocab_size=config.model.vocab_size, seq_len=config.model.seq_len)
        if comm.rank == 0:
            prepare_outputs(config)
    except UsageError as problem:
        error = str(problem)
    comm.agree(error)
    assert tokens is not None
    if len(set(comm.all_gather_bytes(tokens.fingerprint()))) > 1:
        raise UsageError(f"{tokens.name} is not the same text on every rank; give --data a file that all hosts share")
    return config, tokens


def prepare_saving(config: TrainConfig, comm: Communicator, first_step: int) -> None:
    """Prove that `--save` can be written, before hours of training; UsageError on every rank."""
    with agreeing(comm, "--save"):
        if comm.rank == 0 and config.run.save is not None:
            prepare_directory(config.run.save, first_step)


def build(config: TrainConfig, mesh: DeviceMesh, tokens: Tokens, checkpoint: Checkpoint | None) -> Trainer:
    """The trainer, or every rank's UsageError if one rank cannot load the model."""
    error, trainer = None, None
    try:
        trainer = Trainer(config, mesh, tokens, checkpoint)
    except UsageError as problem:
        error = str(problem)
    mesh.world.agree(error)
    assert trainer is not None
    return trainer


if __name__ == "__main__":
    main(run)
