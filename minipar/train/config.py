"""What a training run is told: frozen dataclasses whose fields are the command line (a new flag is a new field).

    config = parse(sys.argv[1:], rank=comm.rank)        every rank parses the same line
    config = resolve(config, world_size=comm.size)      dp is known from here on, and the batch divides

Whatever is wrong with the input raises `UsageError` with the equation and the numbers. Every function here except
`prepare_outputs` is pure, so all ranks raise the same error and the job ends with one line.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from minipar.errors import UsageError
from minipar.parallel.pipeline import SCHEDULES
from minipar.parallel.tensor import check_shape
from minipar.train.options import byte_count, check_options, option, parse_into

COUNT = "[1, inf)"

# A table, laid out by hand: one entry per flag, long help on lines of its own.
# fmt: off


@dataclass(frozen=True)
class MeshConfig:
    """mesh: how many ranks each parallelism takes, and what they share out"""

    dp: int | None = option(None, int, within=COUNT, metavar="N",
        help="data-parallel replicas (default: as many as there are ranks)")
    tp: int = option(1, int, within=COUNT, metavar="T",
        help="tensor-parallel ranks that share each layer: heads and hidden columns; they must divide the heads")
    pp: int = option(1, int, within=COUNT, metavar="P",
        help="pipeline ranks, each with its own layers")
    schedule: str | None = option(None, str, metavar="NAME",
        help=f"order of forwards and backwards in the pipeline: {', '.join(SCHEDULES)}, or a FILE.csv in PyTorch's "
             "format (default: 1f1b)")
    virtual_stages: int | None = option(None, int, within=COUNT, metavar="V",
        help="stages per rank of interleaved-1f1b (default: 2)")
    sequence_parallel: bool = option(False, bool,
        help="with --tp above 1: LayerNorm, dropout and residuals work on 1/T of the sequence; the same bytes travel")
    zero_stage: int = option(0, int, within="[0, 3]", metavar="K",
        help="what data-parallel ranks share out instead of each holding it whole: 0 nothing; 1 optimizer state; "
             "2 gradients too; 3 parameters too")
    sync_every_microbatch: bool = option(False, bool,
        help="with --zero-stage 2 or 3: reduce-scatter after every microbatch, which keeps gradients sharded and sends "
             "them M times; without it microbatches add up in whole gradients, sent once")
    memory_limit: int | None = option(None, byte_count, metavar="BYTES",
        help="refuse to start if parameters, gradients and optimizer state take more than this on a rank; KB, MB, GB, "
             "KiB, MiB, GiB may follow the number")


@dataclass(frozen=True)
class ModelConfig:
    """model: GPT-2's architecture"""

    layers: int = option(2, int, within=COUNT, metavar="L", help="Transformer layers")
    hidden: int = option(128, int, within=COUNT, metavar="H", help="hidden size: elements per token between layers")
    heads: int = option(4, int, within=COUNT, metavar="A", help="attention heads; they must divide hidden")
    seq_len: int = option(64, int, within=COUNT, metavar="T",
        help="sequence length: tokens per sample; without --init-from also the learned positions")
    vocab_size: int = option(256, int, within=COUNT, metavar="V", help="vocabulary: token ids are 0 to V-1")
    init_from: str | None = option(None, str, metavar="DIR",
        help="start from a GPT-2 directory (config.json, model.safetensors), which also gives the shape")


@dataclass(frozen=True)
class DataConfig:
    """data: where tokens come from and in which order"""

    path: str | None = option(None, str, flag="--data", metavar="PATH",
        help="a text file (bytes are tokens) or a nanoGPT .bin (uint16 tokens) (default: the source text of this "
             "Python's standard library)")
    order: str = option("random", str, choices=("random", "sequential"),
        help="random: samples start anywhere; sequential: the text from front to back")
    global_batch: int = option(32, int, within=COUNT, metavar="B", help="samples per step, over all replicas")
    microbatches: int = option(1, int, within=COUNT, metavar="M",
        help="microbatches per replica and step, whose gradients are accumulated")


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer: AdamW, as torch.optim.AdamW computes it"""

    steps: int = option(300, int, within=COUNT, metavar="S", help="optimizer steps")
    lr: float = option(1e-3, float, within="(0, inf)", metavar="LR", help="learning rate after warm-up")
    lr_schedule: str = option("constant", str, choices=("constant", "cosine"),
        help="after warm-up the learning rate stays, or falls along half a cosine to a tenth in the last step")
    warmup_steps: int = option(0, int, within="[0, inf)", metavar="W",
        help="steps in which the learning rate rises linearly: LR*(step+1)/(W+1) in step 0, 1, ...")
    betas: tuple[float, float] = option((0.9, 0.999), float, within="[0, 1)", metavar=("B1", "B2"),
        help="decay per step of the running means of gradient and squared gradient")
    eps: float = option(1e-8, float, within="(0, inf)", metavar="E", help="added to the root of the squared mean")
    weight_decay: float = option(0.01, float, within="[0, inf)", metavar="WD",
        help="decoupled weight decay of parameters with two or more dimensions")
    dropout: float = option(0.0, float, within="[0, 1)", metavar="P",
        help="probability of dropout wherever GPT-2 has it; the masks are the same numbers in every layout")
    clip_grad: float = option(0.0, float, within="[0, inf)", metavar="NORM",
        help="scale gradients down to this global L2 norm; 0: no clipping")


@dataclass(frozen=True)
class RunConfig:
    """run: numbers, device, what is written"""

    seed: int = option(0, int, within="[0, 1.8e19]", metavar="N", help="keys every random draw (weights, samples)")
    dtype: str = option("float32", str, choices=("float32", "float64"),
        help="of parameters, gradients and activations")
    device: str = option("cpu", str, choices=("cpu", "cuda"), help="cpu: NumPy; cuda: CuPy")
    recompute: str = option("none", str, choices=("none", "full"),
        help="full: keep only each layer's input and run its forward again in backward")
    reduction: str = option("ring", str, choices=("ring", "ordered"),
        help="order of sums over ranks: ring, or ordered (rank 0 first: bit for bit as one device)")
    metrics: str | None = option(None, str, metavar="FILE.jsonl",
        help="one JSON line per step: step, loss (nats per token), grad_norm, seconds, tokens_per_second; '-' is "
             "standard output, and progress then goes to standard error")
    trace: str | None = option(None, str, metavar="FILE.json",
        help="Chrome trace of every rank, for Perfetto or `python -m visualize trace`")
    clock: str = option("wall", str, choices=("wall", "cpu", "model"),
        help="time in the trace: wall; cpu: each rank's own CPU time; model: a cost model")
    memory: str | None = option(None, str, metavar="FILE.json",
        help="the memory ledger of every rank: bytes by kind at each moment of the last step, and at the peak; for "
             "`python -m visualize memory`")
    network: tuple[float, float] = option((0.0, 0.0), float, within="[0, inf)", metavar=("ALPHA", "BETA"),
        help="what a message costs on the clocks cpu and model: ALPHA seconds and BETA seconds per byte")
    save: str | None = option(None, str, metavar="DIR",
        help="write checkpoints into DIR, at the end and with --save-every on the way; the last two are kept")
    save_every: int | None = option(None, int, within=COUNT, metavar="K", help="write a checkpoint every K steps")
    resume: str | None = option(None, str, metavar="DIR",
        help="go on from the newest checkpoint in DIR (or from DIR/step-NNNNNNNN) in this layout, whatever wrote it")
    export: str | None = option(None, str, metavar="DIR", help="write the trained model as a GPT-2 directory")
    verify: bool = option(False, bool,
        help="train the same steps on one device and compare every parameter; exit 1 beyond the bound")


# fmt: on


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is told, in sections."""

    mesh: MeshConfig = MeshConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()


def parse(argv: Sequence[str], rank: int = 0) -> TrainConfig:
    """The command line as a checked TrainConfig. `--help` prints on rank 0 and raises SystemExit(0) on every rank.

    Raises UsageError for an unknown flag, a value of the wrong kind or out of range, or values that do not fit.
    """
    config, given = parse_into(
        TrainConfig(),
        argv,
        prog="mpirun -n N python -m minipar.train",
        description="Train a GPT across N ranks.",
        rank=rank,
    )
    if config.model.init_from is not None:
        # The sequence may be shorter than the model's positions; the rest of the shape is the directory's to say.
        for name in ("layers", "hidden", "heads", "vocab_size"):
            if f"model.{name}" in given:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} and --init-from both give the model's shape; give one of them")
    check(config)
    return config


# ---- validation ------------------------------------------------------------------------------------------------------


def check(config: TrainConfig) -> None:
    """Everything that can be known before the number of ranks: ranges, choices, and what must divide or fit."""
    check_options(config)
    if config.model.init_from is None:
        check_heads(config.model)
    if config.run.clock != "wall" and config.run.trace is None:
        raise UsageError(f"--clock {config.run.clock} is the time of a trace; give --trace FILE.json too")
    if any(config.run.network) and config.run.clock == "wall":
        raise UsageError("--network prices messages on the clocks cpu and model; the wall clock takes what they take")
    if config.mesh.sync_every_microbatch and config.mesh.zero_stage < 2:
        raise UsageError(
            f"--sync-every-microbatch keeps gradients sharded between microbatches, but with --zero-stage "
            f"{config.mesh.zero_stage} every rank has them whole; it needs stage 2 or 3"
        )
    if config.mesh.sequence_parallel and config.mesh.tp == 1:
        raise UsageError("--sequence-parallel splits the sequence over the tensor-parallel ranks; give --tp 2 or more")
    for flag, value in (("--schedule", config.mesh.schedule), ("--virtual-stages", config.mesh.virtual_stages)):
        if value is not None and config.mesh.pp == 1:
            raise UsageError(f"{flag} {value} is about a pipeline; give --pp 2 or more")
    if config.mesh.pp > 1 and config.mesh.sync_every_microbatch:
        raise UsageError(
            "--sync-every-microbatch with --pp: a pipeline works on several microbatches at a time, so its gradients "
            "travel once per step"
        )
    if config.run.save_every is not None and config.run.save is None:
        raise UsageError(f"--save-every {config.run.save_every} says how often, not where; give --save DIR too")
    if config.run.resume is not None and config.model.init_from is not None:
        raise UsageError("--resume and --init-from both say which weights to start from; give one of them")
    optimizer = config.optimizer
    if optimizer.warmup_steps > optimizer.steps:
        raise UsageError(
            f"warmup-steps {optimizer.warmup_steps} is more than steps {optimizer.steps}: "
            f"the learning rate would never reach {optimizer.lr}"
        )


def check_heads(model: ModelConfig) -> None:
    """Each attention head works on hidden / heads elements."""
    if model.hidden % model.heads:
        raise UsageError(f"hidden {model.hidden} is not divisible by heads {model.heads}")


def with_shape(
    config: TrainConfig, *, layers: int, hidden: int, heads: int, vocab_size: int, positions: int
) -> TrainConfig:
    """`config` with the shape that `--init-from` found; the sequence must fit its learned positions."""
    model = dataclasses.replace(config.model, layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size)
    check_heads(model)
    if model.seq_len > positions:
        raise UsageError(
            f"seq-len {model.seq_len} is longer than the {positions} positions of {model.init_from}; "
            f"give --seq-len {positions} or less"
        )
    return dataclasses.replace(config, model=model)


def resolve(config: TrainConfig, world_size: int) -> TrainConfig:
    """`config` with dp filled in for `world_size` ranks, or UsageError where mesh or batch do not divide."""
    tp, pp = config.mesh.tp, config.mesh.pp
    dp = config.mesh.dp if config.mesh.dp is not None else max(1, world_size // (tp * pp))
    if dp * tp * pp != world_size:
        raise UsageError(f"dp*tp*pp = {dp}*{tp}*{pp} = {dp * tp * pp}, but mpirun started {world_size} ranks")
    model, sequence = config.model, config.mesh.sequence_parallel
    check_shape(model.heads, model.hidden, tp, model.seq_len if sequence else None)
    batch, microbatches = config.data.global_batch, config.data.microbatches
    if batch % (dp * microbatches):
        raise UsageError(
            f"global-batch {batch} is not divisible by dp*microbatches = {dp}*{microbatches} = {dp * microbatches}"
        )
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, dp=dp))


# ---- what is written -------------------------------------------------------------------------------------------------


def prepare_outputs(config: TrainConfig) -> None:
    """Make the directories of the output files and prove that each file can be written, before hours of training.

    For the rank that writes. Raises UsageError naming the flag and the path.
    """
    run = config.run
    files = [("--metrics", run.metrics), ("--trace", run.trace), ("--memory", run.memory)]
    written = [(flag, path) for flag, path in files if path is not None and (flag, path) != ("--metrics", "-")]
    for (flag, path), (other, same) in itertools.combinations(written, 2):
        if Path(path).resolve() == Path(same).resolve():
            raise UsageError(f"{flag} and {other} would both write {path}")
    for flag, path in written:
        if os.path.isdir(path):
            raise UsageError(f"{flag} {path} is a directory; expected a file")
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a"):  # "a": what an earlier run wrote stays until this one writes
                pass
        except OSError as error:
            raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if run.export is not None:
        try:
            Path(run.export).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run.export):
                pass
        except OSError as error:
            raise UsageError(f"--export {run.export} cannot be written: {error.strerror}") from None


def progress_stream(config: TrainConfig) -> TextIO:
    """Where rank 0 prints: standard error when the metrics take standard output, which then holds nothing else."""
    return sys.stderr if config.run.metrics == "-" else sys.stdout
