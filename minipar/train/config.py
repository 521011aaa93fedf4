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

from minipar.autograd import METHODS, guards
from minipar.comm.mesh import mesh_shape
from minipar.errors import UsageError, UsageParser, check_memory
from minipar.nn.gpt import GPTConfig
from minipar.nn.llama import LlamaConfig
from minipar.nn.moe import MixtralConfig
from minipar.nn.transformer import TransformerConfig
from minipar.parallel import context, token_order, ulysses
from minipar.parallel.pipeline import check as checker
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedule_file import load_csv
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.tensor.plan import check_shape

SECTIONS = ("mesh", "model", "data", "optimizer", "run")
# The models that a flag is for, and why it is not for the others.
ANY = ("gpt2", "llama", "mixtral"), ""
GPT2 = ("gpt2",), "Llama and Mixtral have no dropout"
LLAMA = ("llama", "mixtral"), "each head of GPT-2 has keys and values of its own, and its MLP 4*hidden columns"
MIXTRAL = ("mixtral",), "a layer of other models has one MLP, no experts"
COUNT = "[1, inf)"
DTYPES = ("float32", "float64", "bfloat16", "float16")
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


def dtype_name(text: str) -> str:
    """Return NumPy's name of a dtype that is called bf16, fp16, fp32 or fp64 (ml_dtypes adds bfloat16)."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(text, text)


def option(
    default: Any, kind: Callable[[str], Any], within: Any = None, metavar: Any = None, help: Any = None, **details: Any
) -> Any:
    """Declare a dataclass field that is also a flag. A tuple as default takes as many values as it has.

    `kind` is int, float, str, bool (a switch), or a function that converts the text; `within` an interval in
    mathematical notation such as "[0, 1)". `details` are `choices`; `flag` if the field's name is not the flag's;
    `of`, the models that the flag is for; `needs`, another flag without which this one does nothing; and `size`, the
    name in TransformerConfig of a size of the model.
    """
    metadata = {"kind": kind, "within": within, "metavar": metavar, "help": help, "of": ANY}
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
    cp_order: str = option("zigzag", str, choices=token_order.ORDERS,
        help="zigzag: an early and a late part of each sample, equal work on every rank; contiguous: the r-th part")
    ep: int = option(1, int, COUNT, "P", "neighbours among dp*cp that each hold 1/P of the experts", of=MIXTRAL)
    pp: int = option(1, int, COUNT, "P", "pipeline ranks, each with its own layers")
    schedule: str | None = option(None, str, None, "NAME", needs="--pp 2 or more",
        help=f"order of the pipeline: {', '.join(SCHEDULES)}, or PyTorch's FILE.csv (default: 1f1b)")
    virtual_stages: int | None = option(None, int, COUNT, "V", needs="--pp 2 or more",
        help="stages per rank of interleaved-1f1b (default: 2)")
    sequence_parallel: bool = option(False, bool, needs="--tp 2 or more",
        help="LayerNorm, dropout and residuals work on 1/T of the sequence; the same bytes travel")
    zero_stage: int = option(0, int, "[0, 3]", "K",
        "what data-parallel ranks shard: 0 nothing; 1 optimizer state; 2 gradients too; 3 parameters too")
    zero_replicas: int = option(1, int, COUNT, "Q", needs="--zero-stage 1, 2 or 3",
        help="shard within Q groups of near ranks, such as hosts, and sum gradients over groups (HSDP)")
    sync_every_microbatch: bool = option(False, bool,
        help="with --zero-stage 2 or 3: keep gradients sharded between microbatches, and send them M times, not once")
    memory_limit: int | None = option(None, byte_count, None, "BYTES",
        "refuse to start if parameters, gradients and optimizer state take more on a rank; such as 1500000 or 1.5GiB")


@dataclass(frozen=True)
class ModelConfig:
    """model: GPT-2's architecture, Llama's, or Mixtral's"""

    layers: int = option(2, int, COUNT, "L", "Transformer layers", size="n_layer")
    hidden: int = option(128, int, COUNT, "H", "hidden size: elements per token between layers", size="n_embd")
    heads: int = option(4, int, COUNT, "A", "attention heads; they must divide hidden", size="n_head")
    seq_len: int = option(64, int, COUNT, "T", "tokens per sample; without --init-from also GPT-2's learned positions")
    vocab_size: int = option(256, int, COUNT, "V", "vocabulary: token ids are 0 to V-1", size="vocab_size")
    model: str = option("gpt2", str, choices=ANY[0], size="model_type",
        help="the architecture: GPT-2's; Llama's, whose head is not tied to the embedding; or Mixtral's, with experts")
    kv_heads: int | None = option(None, int, COUNT, "N", "heads of keys and values (default: as --heads)",
        of=LLAMA, size="n_kv_head")
    ffn: int | None = option(None, int, COUNT, "F",
        "columns of each MLP (default: 8/3 of hidden, up to a multiple of 64)", of=LLAMA, size="n_inner")
    experts: int | None = option(None, int, COUNT, "E", "MLPs in each layer (default: 8)",
        of=MIXTRAL, size="num_local_experts")
    top_k: int | None = option(None, int, COUNT, "K", "experts that each token is sent to (default: 2)",
        of=MIXTRAL, size="num_experts_per_tok")
    aux_loss: float = option(0.0, float, "[0, inf)", "COEF", "coefficient of the routers' balance loss", of=MIXTRAL)
    router_bias: float = option(0.0, float, "[0, inf)", "RATE", "change per step of the routers' biases", of=MIXTRAL)
    capacity_factor: float | None = option(None, float, "(0, inf)", "F", of=MIXTRAL,
        help="experts take at most F times the mean load of a microbatch and drop the rest (default: take all)")
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
    eval_data: str | None = option(None, str, None, "PATH", needs="--eval-every K",
        help="the text to evaluate on (default: the end of the training text, which is then not trained on)")


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
    dropout: float = option(0.0, float, "[0, 1)", "P", "probability of dropout; the same in every layout", of=GPT2)
    clip_grad: float = option(0.0, float, "[0, inf)", "NORM", "scale gradients down to this L2 norm; 0: no clipping")


@dataclass(frozen=True)
class RunConfig:
    """run: seed, precision, device, and the files that are written"""

    seed: int = option(0, int, "[0, 1.8e19]", "N", "keys every random draw (weights, samples)")
    dtype: str = option("float32", dtype_name, choices=DTYPES,
        help="of parameters and activations; with bf16 and fp16 the optimizer has float32 copies of the parameters")
    gradients: str | None = option(None, dtype_name, choices=("float32", "bfloat16", "float16"),
        help="in which microbatches' gradients add up, if --dtype has 2 bytes (default: fp32)")
    reduce_dtype: str | None = option(None, dtype_name, choices=("float32", "bfloat16", "float16"),
        help="in which gradients and tensor-parallel sums travel and add up, if --dtype has 2 bytes (default: fp32)")
    skip_nonfinite: bool = option(False, bool, help="skip a step whose loss or gradient is not finite, and count it")
    device: str = option("cpu", str, choices=("cpu", "cuda"), help="cpu: NumPy; cuda: CuPy")
    recompute: str = option("none", str, choices=("none", "full"),
        help="full: keep only each layer's input and run its forward again in backward")
    attention: str = option("auto", str, choices=METHODS,
        help="full: keep all scores; blockwise: compute them again in backward; auto: full if short, or with dropout")
    reduction: str = option("ring", str, choices=("ring", "ordered"),
        help="order of sums over ranks: ring, or ordered (rank 0 first: bit for bit as one device)")
    metrics: str | None = option(None, str, None, "FILE.jsonl",
        "one JSON line per step; '-' is standard output, and progress then goes to standard error")
    trace: str | None = option(None, str, None, "FILE.json",
        "Chrome trace of every rank, for Perfetto or `minipar visualize trace`")
    clock: str = option("wall", str, choices=("wall", "cpu", "model"), needs="--trace FILE.json",
        help="time in the trace: wall; cpu: each rank's own CPU time; model: a cost model")
    memory: str | None = option(None, str, None, "FILE.json",
        "every rank's bytes by kind at each moment of the last step and at the peak, for `minipar visualize memory`")
    record: str | None = option(None, str, None, "DIR",
        "record the loss, gradients and updates of each step for `python -m minipar.compare`; DIR is new")
    network: tuple[float, float] = option((0.0, 0.0), float, "[0, inf)", ("ALPHA", "BETA"),
        "what a message costs: ALPHA seconds and BETA seconds per byte", needs="--clock cpu or model")
    save: str | None = option(None, str, None, "DIR",
        "write checkpoints into DIR, at the end and with --save-every on the way; the last two are kept")
    save_every: int | None = option(None, int, COUNT, "K", "write a checkpoint every K steps", needs="--save DIR")
    resume: str | None = option(None, str, None, "DIR",
        "continue from the newest checkpoint in DIR (or from DIR/step-NNNNNNNN) in the layout given here; model, data, "
        "optimizer, seed, dtype and steps are the checkpoint's unless given; auto: from --save DIR, if it has one")
    export: str | None = option(None, str, None, "DIR",
        "write the trained model as a directory of Hugging Face; DIR is new, empty, or an earlier export")
    export_dtype: str | None = option(None, dtype_name, choices=DTYPES, needs="--export DIR",
        help="of --export (default: that of --dtype)")
    verify: bool = option(False, bool,
        help="compute each step on one device too and compare loss, norm, gradients and updates; exit 1 if they differ")


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
            flag = field.metadata.get("flag") or "--" + field.name.replace("_", "-")
            yield section, field, flag, getattr(values, field.name)


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return `config` with the given fields replaced; the keys are "section.field", and a list becomes a tuple."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for section in SECTIONS:
        fields = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})
    return config


def parse(argv: Sequence[str], rank: int = 0) -> TrainConfig:
    """Return the command line as a checked TrainConfig. UsageError; SystemExit(0) after `--help`, printed by rank 0."""
    # No abbreviations: one that works today would be ambiguous with tomorrow's flag.
    prog, description = "mpirun -n N python -m minipar.train", "Train a GPT, a Llama or a Mixtral across N ranks."
    parser = UsageParser(prog=prog, description=description, allow_abbrev=False, prints=rank == 0)
    groups = {section: parser.add_argument_group(getattr(TrainConfig(), section).__doc__) for section in SECTIONS}
    for section, field, flag, default in flags(TrainConfig()):
        # SUPPRESS: the result holds only what the user wrote; the dataclasses hold the defaults.
        arguments: dict[str, Any] = {"dest": f"{section}.{field.name}", "default": argparse.SUPPRESS}
        metadata, text = field.metadata, field.metadata["help"]
        if metadata["of"] != ANY:
            text = f"with --model {' or '.join(metadata['of'][0])}: {text}"
        if "needs" in metadata:
            text = f"with {metadata['needs']}: {text}"
        if metadata["kind"] is bool:
            arguments["action"] = "store_true"
        else:
            arguments |= {"type": metadata["kind"], "metavar": metadata["metavar"], "choices": metadata.get("choices")}
            if isinstance(default, tuple):
                arguments["nargs"] = len(default)
            if default is not None:
                text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        groups[section].add_argument(flag, help=text, **arguments)
    given = vars(parser.parse_args(argv))
    config = dataclasses.replace(with_values(TrainConfig(), given), given=frozenset(given))
    check(config)
    return config


def inside(value: float, interval: str) -> bool:
    """Return whether `value` is in an interval such as "[0, 1)" or "(0, inf)"; nan is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")


def check(config: TrainConfig) -> None:
    """Check what can be known before the number of ranks and the model of a checkpoint or directory. UsageError."""
    mesh, run, init_from = config.mesh, config.run, config.model.init_from
    changed = {flag for _, field, flag, value in flags(config) if value != field.default}
    for section, field, flag, value in flags(config):
        within, choices, needs = (field.metadata.get(key) for key in ("within", "choices", "needs"))
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if within is not None and one is not None and not inside(one, within):
                raise UsageError(f"{flag} {one} is outside {within}")
        if choices is not None and value is not None and value not in choices:
            raise UsageError(f"{flag} {value}: choose from {', '.join(choices)}")
        if value == "":
            raise UsageError(f"{flag} is empty; expected {field.metadata['metavar']}")
        if needs is not None and flag in changed and needs.split()[0] not in changed:
            words = [flag, *(str(one) for one in values if one is not True)]
            raise UsageError(f"{' '.join(words)} does nothing without {needs}")
        if init_from is not None and "size" in field.metadata and f"{section}.{field.name}" in config.given:
            raise UsageError(f"{flag} and --init-from both give the model's shape; give one of them")
    if mesh.sync_every_microbatch and mesh.zero_stage < 2:
        whole = f"with --zero-stage {mesh.zero_stage} every rank has them whole; it needs stage 2 or 3"
        raise UsageError(f"--sync-every-microbatch keeps gradients sharded between microbatches, but {whole}")
    if mesh.cp > 1 and config.model.capacity_factor is not None:
        raise UsageError("--capacity-factor shares out the tokens of whole samples, of which --cp gives a rank a part")
    if mesh.cp == 1 and {"mesh.context_parallel", "mesh.cp_order"} & config.given:
        raise UsageError("--context-parallel and --cp-order are about context parallelism; give --cp 2 or more")
    dropout = config.optimizer.dropout
    if dropout > 0 and mesh.cp > 1 and mesh.context_parallel != "ulysses":
        method = f"--context-parallel {mesh.context_parallel}"
        guards.refuse_dropout(f"--dropout {dropout}", method, "--context-parallel ulysses or --dropout 0")
    if dropout > 0 and run.attention == "blockwise":
        guards.refuse_dropout(f"--dropout {dropout}", "--attention blockwise", "--attention full or --dropout 0")
    if mesh.pp > 1 and mesh.sync_every_microbatch:
        raise UsageError("--sync-every-microbatch: a pipeline mixes microbatches; its gradients travel once per step")
    if run.resume == "auto" and run.save is None:
        raise UsageError("--resume auto continues from the newest checkpoint in the DIR of --save; give --save DIR too")
    if run.resume not in (None, "auto") and init_from is not None:
        raise UsageError("--resume and --init-from both say which weights to start from; give one of them")


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
    fields = [field for field in dataclasses.fields(ModelConfig) if shape.model_type in field.metadata["of"][0]]
    sizes = {f"model.{field.name}": field.metadata["size"] for field in fields if "size" in field.metadata}
    return with_values(config, {name: getattr(shape, size) for name, size in sizes.items()})


def resolve(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return `config` with dp filled in for `world_size` ranks; UsageError if mesh, model or batch do not fit."""
    for _, field, flag, value in flags(config):
        models, why = field.metadata["of"]
        if config.model.model not in models and value != field.default:
            raise UsageError(f"{flag} {value} is for --model {' or '.join(models)}: {why}")
    cp, tp, steps, warmup = config.mesh.cp, config.mesh.tp, config.optimizer.steps, config.optimizer.warmup_steps
    if warmup > steps:
        never = f"the learning rate would never reach {config.optimizer.lr}"
        raise UsageError(f"warmup-steps {warmup} is more than steps {steps}: {never}")
    dp = mesh_shape(world_size, "mpirun", config.mesh.dp, tp, config.mesh.pp, cp)["dp"]
    if dp % (replicas := config.mesh.zero_replicas):
        raise UsageError(f"dp/zero-replicas = {dp}/{replicas} is not a whole number")
    if replicas > 1 and config.mesh.ep > 1:
        remedy = "give 1 replica or ep = 1"
        raise UsageError(
            f"zero-replicas {replicas} with ep {config.mesh.ep}: shards of experts have no replicas; {remedy}"
        )
    try:
        config = with_shape(config, shape_of(config.model))  # fills kv_heads and ffn in
    except ValueError as error:
        raise UsageError(str(error)) from None
    model = config.model
    if cp > 1:
        token_order.check_length(model.seq_len, cp, config.mesh.cp_order)
    check_shape(shape_of(model), tp, model.seq_len // cp if config.mesh.sequence_parallel else None)
    if config.mesh.context_parallel == "ulysses":
        ulysses.check_heads(model.heads // tp, shape_of(model).n_kv_head // tp, cp)
    batch, m = config.data.global_batch, config.data.microbatches
    if batch % (dp * m):
        raise UsageError(f"global-batch {batch} is not divisible by dp*microbatches = {dp}*{m} = {dp * m}")
    check_memory(Decimal(8 * batch) * model.seq_len, f"positions: 8 bytes * {batch} samples * {model.seq_len} tokens")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, dp=dp))
    return with_values(config, _precision(config))


def _precision(config: TrainConfig) -> dict[str, str]:
    """Return the dtypes of gradients in 2-byte training that were not given. UsageError for what it does not have."""
    run = config.run
    given = {"--gradients": run.gradients, "--reduce-dtype": run.reduce_dtype}
    for flag, value in given.items():
        if value is not None and run.dtype in ("float32", "float64"):
            raise UsageError(f"{flag} {value} is for --dtype bf16 or fp16")
        if value == "float16" != run.dtype:
            raise UsageError(f"{flag} float16 is for --dtype fp16, which scales the loss into its range")
    if run.dtype in ("float32", "float64"):
        return {}
    return {"run.gradients": run.gradients or "float32", "run.reduce_dtype": run.reduce_dtype or "float32"}


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
