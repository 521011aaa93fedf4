"""The configuration of a training run: frozen dataclasses whose fields are the flags of the command line.

A new flag is a new field. Invalid input raises `UsageError` with the equation and the values, the same on all ranks.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from minipar.autograd import METHODS
from minipar.comm.mesh import mesh_shape
from minipar.errors import UsageError, UsageParser, check_memory, suggest
from minipar.nn.gpt import GPTConfig
from minipar.nn.llama import LlamaConfig
from minipar.nn.moe import MixtralConfig
from minipar.nn.transformer import TransformerConfig
from minipar.parallel import context
from minipar.parallel.pipeline import check as checker
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import SCHEDULES, load_csv, make
from minipar.parallel.tensor.plan import check_shape

SECTIONS = ("mesh", "model", "data", "optimizer", "run")
SHAPE = "--model --layers --hidden --heads --kv-heads --ffn --experts --top-k --vocab-size".split()  # of the model
EXPERTS = "--ep --experts --top-k --aux-loss --router-bias --capacity-factor".split()  # of a Mixtral alone
COUNT = "[1, inf)"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_count(text: str) -> int:
    """Convert "1500000", "1.5MB" or "512KiB" to a number of bytes, at least 1."""
    number = text.rstrip("KMGiB ")
    try:
        count = float(number) * UNITS[text[len(number) :].strip()]
    except (KeyError, ValueError):
        count = 0.0
    if not 1 <= count < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1500000, 1.5MB or 512KiB")
    return int(count)


def option(
    default: Any, kind: Callable[[str], Any], within: Any = None, metavar: Any = None, help: Any = None, **details: Any
) -> Any:
    """Declare a dataclass field that is also a flag. A tuple as default takes as many values as it has.

    `kind` is int, float, str, bool (a switch), or a function that converts the text; `within` an interval in
    mathematical notation such as "[0, 1)". `details` are `choices`, and `flag` if the field's name is not the flag's.
    """
    metadata = {"kind": kind, "within": within, "metavar": metavar, "help": help, "choices": None, "flag": None}
    return dataclasses.field(default=default, metadata=metadata | details)


# A table, laid out by hand: one entry per flag, its help on lines of its own where it is long.
# fmt: off


@dataclass(frozen=True)
class MeshConfig:
    """mesh: how many ranks each kind of parallelism takes, and what they share"""

    dp: int | None = option(None, int, COUNT, "N", "data-parallel replicas (default: as many as there are ranks)")
    tp: int = option(1, int, COUNT, "T", "tensor-parallel ranks that share each layer; they must divide the heads")
    cp: int = option(1, int, COUNT, "C", "context-parallel ranks that share each sample's tokens; 2*C must divide them")
    context_parallel: str = option("ring", str, choices=context.METHODS,
        help="keys and values travel around a ring, or are gathered, or each rank takes all tokens of some heads")
    cp_order: str = option("zigzag", str, choices=context.ORDERS,
        help="zigzag: an early and a late part of each sample, equal work on every rank; contiguous: the r-th part")
    ep: int = option(1, int, COUNT, "P", "of Mixtral: neighbours among dp*cp that each hold 1/P of the experts")
    pp: int = option(1, int, COUNT, "P", "pipeline ranks, each with its own layers")
    schedule: str | None = option(None, str, None, "NAME",
        f"order of the pipeline: {', '.join(SCHEDULES)}, or PyTorch's FILE.csv (default: 1f1b)")
    virtual_stages: int | None = option(None, int, COUNT, "V", "stages per rank of interleaved-1f1b (default: 2)")
    sequence_parallel: bool = option(False, bool,
        help="with --tp above 1: LayerNorm, dropout and residuals work on 1/T of the sequence; the same bytes travel")
    zero_stage: int = option(0, int, "[0, 3]", "K",
        "what data-parallel ranks shard: 0 nothing; 1 optimizer state; 2 gradients too; 3 parameters too")
    zero_replicas: int = option(1, int, COUNT, "Q",
        "with --zero-stage: shard within Q groups of near ranks, such as hosts, and sum gradients over groups (HSDP)")
    sync_every_microbatch: bool = option(False, bool,
        help="with --zero-stage 2 or 3: reduce-scatter after every microbatch, which keeps gradients sharded and sends "
             "them M times; without it microbatches accumulate in whole gradients, sent once")
    memory_limit: int | None = option(None, byte_count, None, "BYTES",
        "refuse to start if parameters, gradients and optimizer state take more on a rank; such as 1500000 or 1.5GiB")


@dataclass(frozen=True)
class ModelConfig:
    """model: GPT-2's architecture, Llama's, or Mixtral's"""

    layers: int = option(2, int, COUNT, "L", "Transformer layers")
    hidden: int = option(128, int, COUNT, "H", "hidden size: elements per token between layers")
    heads: int = option(4, int, COUNT, "A", "attention heads; they must divide hidden")
    seq_len: int = option(64, int, COUNT, "T", "tokens per sample; without --init-from also GPT-2's learned positions")
    vocab_size: int = option(256, int, COUNT, "V", "vocabulary: token ids are 0 to V-1")
    model: str = option("gpt2", str, choices=("gpt2", "llama", "mixtral"),
        help="the architecture: GPT-2's; Llama's, whose head is not tied to the embedding; or Mixtral's, with experts")
    kv_heads: int | None = option(None, int, COUNT, "N", "not of GPT-2: heads of keys and values (default: as --heads)")
    ffn: int | None = option(None, int, COUNT, "F",
        "columns of Llama's MLP or of each expert (default: 8/3 of hidden, up to a multiple of 64)")
    experts: int | None = option(None, int, COUNT, "E", "of Mixtral: MLPs in each layer (default: 8)")
    top_k: int | None = option(None, int, COUNT, "K", "of Mixtral: experts that each token is sent to (default: 2)")
    aux_loss: float = option(0.0, float, "[0, inf)", "COEF", "of Mixtral: coefficient of the routers' balance loss")
    router_bias: float = option(0.0, float, "[0, inf)", "RATE", "of Mixtral: change per step of the routers' biases")
    capacity_factor: float | None = option(None, float, "(0, inf)", "F",
        "of Mixtral: experts take at most F times the mean load of a microbatch and drop the rest (default: take all)")
    init_from: str | None = option(None, str, None, "DIR",
        "start from a GPT-2, Llama or Mixtral directory (config.json, model.safetensors), which also gives the shape")


@dataclass(frozen=True)
class DataConfig:
    """data: the source of the tokens and their order"""

    path: str | None = option(None, str, None, "PATH",
        "a text (bytes are tokens) or a nanoGPT .bin (uint16 tokens) (default: Python's library)", flag="--data")
    order: str = option("random", str, choices=("random", "sequential"),
        help="random: samples start anywhere; sequential: the text from front to back")
    global_batch: int = option(32, int, COUNT, "B", "samples per step, over all replicas")
    microbatches: int = option(1, int, COUNT, "M", "microbatches per replica and step, whose gradients are accumulated")
    eval_every: int | None = option(None, int, COUNT, "K",
        "every K steps and at the end: the loss on text that training does not see, the same in every layout")
    eval_data: str | None = option(None, str, None, "PATH",
        "the text for --eval-every (default: the end of the training text, which is then not trained on)")


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer: AdamW, as torch.optim.AdamW computes it"""

    steps: int = option(300, int, COUNT, "S", "optimizer steps")
    lr: float = option(1e-3, float, "(0, inf)", "LR", "learning rate after warm-up")
    lr_schedule: str = option("constant", str, choices=("constant", "cosine"),
        help="after warm-up the learning rate stays, or falls along half a cosine to a tenth in the last step")
    warmup_steps: int = option(0, int, "[0, inf)", "W", "the learning rate is LR*(step+1)/(W+1) in steps 0 to W-1")
    betas: tuple[float, float] = option((0.9, 0.999), float, "[0, 1)", ("B1", "B2"),
        "decay per step of the running means of gradient and squared gradient")
    eps: float = option(1e-8, float, "(0, inf)", "E", "added to the root of the squared mean")
    weight_decay: float = option(0.01, float, "[0, inf)", "WD", "decoupled, of parameters with two or more dimensions")
    dropout: float = option(0.0, float, "[0, 1)", "P", "probability wherever GPT-2 has it; the same in every layout")
    clip_grad: float = option(0.0, float, "[0, inf)", "NORM", "scale gradients down to this L2 norm; 0: no clipping")


@dataclass(frozen=True)
class RunConfig:
    """run: seed, precision, device, and the files that are written"""

    seed: int = option(0, int, "[0, 1.8e19]", "N", "keys every random draw (weights, samples)")
    dtype: str = option("float32", str, choices=("float32", "float64"), help="of parameters, gradients and activations")
    device: str = option("cpu", str, choices=("cpu", "cuda"), help="cpu: NumPy; cuda: CuPy")
    recompute: str = option("none", str, choices=("none", "full"),
        help="full: keep only each layer's input and run its forward again in backward")
    attention: str = option("auto", str, choices=METHODS,
        help="full: keep all scores, in memory that grows as the square of the sequence; blockwise: keep none and "
             "compute them again in backward; auto: full for short sequences, blockwise for long ones")
    reduction: str = option("ring", str, choices=("ring", "ordered"),
        help="order of sums over ranks: ring, or ordered (rank 0 first: bit for bit as one device)")
    metrics: str | None = option(None, str, None, "FILE.jsonl",
        "one JSON line per step: step, loss (nats per token), grad_norm, seconds, tokens_per_second, with a capacity "
        "dropped; '-' is standard output, and progress then goes to standard error")
    trace: str | None = option(None, str, None, "FILE.json",
        "Chrome trace of every rank, for Perfetto or `python -m visualize trace`")
    clock: str = option("wall", str, choices=("wall", "cpu", "model"),
        help="time in the trace: wall; cpu: each rank's own CPU time; model: a cost model")
    memory: str | None = option(None, str, None, "FILE.json",
        "every rank's bytes by kind at each moment of the last step and at the peak, for `python -m visualize memory`")
    record: str | None = option(None, str, None, "DIR",
        "record the loss, gradients and updates of each step for `python -m minipar.compare`; DIR is new")
    network: tuple[float, float] = option((0.0, 0.0), float, "[0, inf)", ("ALPHA", "BETA"),
        "what a message costs on the clocks cpu and model: ALPHA seconds and BETA seconds per byte")
    save: str | None = option(None, str, None, "DIR",
        "write checkpoints into DIR, at the end and with --save-every on the way; the last two are kept")
    save_every: int | None = option(None, int, COUNT, "K", "write a checkpoint every K steps")
    resume: str | None = option(None, str, None, "DIR",
        "continue from the newest checkpoint in DIR (or from DIR/step-NNNNNNNN) in the layout given here; model, data, "
        "optimizer, seed, dtype and steps are the checkpoint's unless given; auto: from --save DIR, if it has one")
    export: str | None = option(None, str, None, "DIR",
        "write the trained model as a directory of Hugging Face; DIR is new, empty, or an earlier export")
    verify: bool = option(False, bool,
        help="train the same steps on one device and compare every parameter; exit 1 beyond the bound")


# fmt: on


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run, in sections, and the names ("section.field") that the user gave explicitly."""

    mesh: MeshConfig = MeshConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)


def flags(config: TrainConfig) -> Iterator[tuple[str, dataclasses.Field[Any], str, Any]]:
    """Yield (section, field, flag, value in `config`) for every flag."""
    for section in SECTIONS:
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            yield section, field, flag, getattr(values, field.name)


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return `config` with the given fields replaced; the keys are "section.field"."""
    for section in SECTIONS:
        fields = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})
    return config


def parse(argv: Sequence[str], rank: int = 0) -> TrainConfig:
    """Return the command line as a checked TrainConfig. UsageError; SystemExit(0) after `--help`, printed by rank 0."""
    # No abbreviations: one that works today would be ambiguous with tomorrow's flag.
    prog, description = "mpirun -n N python -m minipar.train", "Train a GPT or a Llama across N ranks."
    parser = UsageParser(prog=prog, description=description, allow_abbrev=False, prints=rank == 0)
    groups = {section: parser.add_argument_group(getattr(TrainConfig(), section).__doc__) for section in SECTIONS}
    for section, field, flag, default in flags(TrainConfig()):
        # SUPPRESS: the result holds only what the user wrote; the dataclasses hold the defaults.
        arguments: dict[str, Any] = {"dest": f"{section}.{field.name}", "default": argparse.SUPPRESS}
        text = field.metadata["help"]
        if field.metadata["kind"] is bool:
            arguments["action"] = "store_true"
        else:
            arguments |= {"type": field.metadata["kind"]} | {key: field.metadata[key] for key in ("choices", "metavar")}
            if isinstance(default, tuple):
                arguments["nargs"] = len(default)
            if default is not None:
                text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        groups[section].add_argument(flag, help=text, **arguments)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        own = [flag for _, _, flag, _ in flags(TrainConfig())]
        close = [suggest(word.partition("=")[0], own) for word in unknown if word.startswith("-")]
        similar = ", ".join(dict.fromkeys(filter(None, close)))
        question = f"; did you mean {similar}?" if similar else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{question}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()}
    config = dataclasses.replace(with_values(TrainConfig(), values), given=frozenset(values))
    for flag in SHAPE:  # seq-len may be shorter than the positions
        if config.model.init_from is not None and "model." + flag[2:].replace("-", "_") in values:
            raise UsageError(f"{flag} and --init-from both give the model's shape; give one of them")
    check(config)
    return config


def inside(value: float, interval: str) -> bool:
    """Return whether `value` is in an interval such as "[0, 1)" or "(0, inf)"; nan is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")


def check(config: TrainConfig) -> None:
    """Check what can be known before the number of ranks; the sizes of a checkpoint or a model directory are later."""
    for _, field, flag, value in flags(config):
        within, choices = field.metadata["within"], field.metadata["choices"]
        for one in value if isinstance(value, tuple) else (value,):
            if within is not None and one is not None and not inside(one, within):
                raise UsageError(f"{flag} {one} is outside {within}")
        if choices is not None and value not in choices:
            raise UsageError(f"{flag} {value}: choose from {', '.join(choices)}")
        if value == "":
            raise UsageError(f"{flag} is empty; expected {field.metadata['metavar']}")
    mesh, run = config.mesh, config.run
    if run.resume is None and config.model.init_from is None:
        check_sizes(config)
    if run.clock != "wall" and run.trace is None:
        raise UsageError(f"--clock {run.clock} is the time of a trace; give --trace FILE.json too")
    if any(run.network) and run.clock == "wall":
        raise UsageError("--network prices messages on the clocks cpu and model; the wall clock takes what they take")
    if mesh.zero_replicas > 1 and mesh.zero_stage == 0:
        raise UsageError(f"--zero-replicas {mesh.zero_replicas} repeats shards; give --zero-stage 1, 2 or 3 too")
    if mesh.sync_every_microbatch and mesh.zero_stage < 2:
        whole = f"with --zero-stage {mesh.zero_stage} every rank has them whole; it needs stage 2 or 3"
        raise UsageError(f"--sync-every-microbatch keeps gradients sharded between microbatches, but {whole}")
    if mesh.sequence_parallel and mesh.tp == 1:
        raise UsageError("--sequence-parallel splits the sequence over the tensor-parallel ranks; give --tp 2 or more")
    if mesh.cp > 1 and config.model.capacity_factor is not None:
        raise UsageError("--capacity-factor shares out the tokens of whole samples, of which --cp gives a rank a part")
    if mesh.cp == 1 and {"mesh.context_parallel", "mesh.cp_order"} & config.given:
        raise UsageError("--context-parallel and --cp-order are about context parallelism; give --cp 2 or more")
    for flag, value in (("--schedule", mesh.schedule), ("--virtual-stages", mesh.virtual_stages)):
        if value is not None and mesh.pp == 1:
            raise UsageError(f"{flag} {value} is about a pipeline; give --pp 2 or more")
    if mesh.pp > 1 and mesh.sync_every_microbatch:
        raise UsageError("--sync-every-microbatch: a pipeline mixes microbatches; its gradients travel once per step")
    if config.data.eval_data is not None and config.data.eval_every is None:
        raise UsageError(f"--eval-data {config.data.eval_data} says where, not how often; give --eval-every K too")
    if run.save_every is not None and run.save is None:
        raise UsageError(f"--save-every {run.save_every} says how often, not where; give --save DIR too")
    if run.resume == "auto" and run.save is None:
        raise UsageError("--resume auto continues from the newest checkpoint in the DIR of --save; give --save DIR too")
    if run.resume not in (None, "auto") and config.model.init_from is not None:
        raise UsageError("--resume and --init-from both say which weights to start from; give one of them")


def check_sizes(config: TrainConfig) -> None:
    """Check the model's flags against one another, and that the warm-up ends before the run does."""
    model, warmup, steps, lr = config.model, config.optimizer.warmup_steps, config.optimizer.steps, config.optimizer.lr
    for flag, value in (("--kv-heads", model.kv_heads), ("--ffn", model.ffn)):
        if model.model == "gpt2" and value is not None:
            why = "each head of GPT-2 has keys and values of its own, and its MLP 4*hidden columns"
            raise UsageError(f"{flag} {value} is for --model llama: {why}")
    for _, field, flag, value in flags(config):
        if model.model != "mixtral" and flag in EXPERTS and value != field.default:
            raise UsageError(f"{flag} {value} is for --model mixtral: a layer of other models has one MLP, no experts")
    if model.model != "gpt2" and config.optimizer.dropout:
        why = f"{model.model.title()} has no dropout"
        raise UsageError(f"--dropout {config.optimizer.dropout} is for --model gpt2: {why}")
    try:
        shape_of(model)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if warmup > steps:
        raise UsageError(f"warmup-steps {warmup} is more than steps {steps}: the learning rate would never reach {lr}")


def shape_of(model: ModelConfig) -> TransformerConfig:
    """Return the shape that the flags describe. ValueError if its sizes do not divide."""
    if model.model == "gpt2":
        return GPTConfig(model.vocab_size, model.seq_len, model.hidden, model.layers, model.heads)
    ffn = model.ffn or -(-8 * model.hidden // 192) * 64
    sizes = (model.vocab_size, model.hidden, ffn, model.layers, model.heads, model.kv_heads, model.seq_len)
    if model.model == "llama":
        return LlamaConfig(*sizes)
    return MixtralConfig(*sizes, num_local_experts=model.experts or 8, num_experts_per_tok=model.top_k or 2)


def with_shape(config: TrainConfig, shape: TransformerConfig) -> TrainConfig:
    """Return `config` with the flags that describe this shape; the sequence must fit its positions."""
    length, n, source = config.model.seq_len, shape.n_positions, config.model.init_from
    if length > n:
        raise UsageError(f"seq-len {length} is longer than the {n} positions of {source}; give --seq-len {n} or less")
    names = {"model": "model_type", "layers": "n_layer", "hidden": "n_embd", "heads": "n_head"}
    names["vocab_size"] = "vocab_size"
    if shape.model_type != "gpt2":
        names |= {"kv_heads": "n_kv_head", "ffn": "n_inner"}
    if shape.model_type == "mixtral":
        names |= {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
    return with_values(config, {f"model.{ours}": getattr(shape, name) for ours, name in names.items()})


def resolve(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return `config` with dp filled in for `world_size` ranks; UsageError if mesh, model or batch do not divide."""
    cp, tp = config.mesh.cp, config.mesh.tp
    dp = mesh_shape(world_size, "mpirun", config.mesh.dp, tp, config.mesh.pp, cp)["dp"]
    if dp % (replicas := config.mesh.zero_replicas):
        raise UsageError(f"dp/zero-replicas = {dp}/{replicas} is not a whole number")
    check_sizes(config)
    config = with_shape(config, shape_of(config.model))  # fills kv_heads and ffn in
    model = config.model
    if cp > 1:
        context.check_length(model.seq_len, cp, config.mesh.cp_order)
    check_shape(shape_of(model), tp, model.seq_len // cp if config.mesh.sequence_parallel else None)
    if config.mesh.context_parallel == "ulysses":
        context.check_heads(model.heads // tp, shape_of(model).n_kv_head // tp, cp)
    batch, m = config.data.global_batch, config.data.microbatches
    if batch % (dp * m):
        raise UsageError(f"global-batch {batch} is not divisible by dp*microbatches = {dp}*{m} = {dp * m}")
    check_memory(Decimal(8 * batch) * model.seq_len, f"positions: 8 bytes * {batch} samples * {model.seq_len} tokens")
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, dp=dp))


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the schedule that `--schedule` names, checked, for the mesh and the number of microbatches. UsageError."""
    name, pp, microbatches = config.mesh.schedule or "1f1b", config.mesh.pp, config.data.microbatches
    if not name.endswith(".csv"):
        schedule = make(name, pp, microbatches, config.mesh.virtual_stages)
    else:
        schedule = load_csv(name)
        if config.mesh.virtual_stages is not None:
            raise UsageError(f"--virtual-stages is for a named schedule; {name} says which rank has which stages")
        if (len(schedule.ranks), schedule.microbatches) != (pp, microbatches):
            its = f"{len(schedule.ranks)} ranks and {schedule.microbatches} microbatches"
            raise UsageError(f"schedule {name} is for {its}, but pp = {pp} and microbatches = {microbatches}")
    checker.check(schedule)
    return schedule
