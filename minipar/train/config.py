"""The configuration of a training run: the rules that its settings must keep.

Invalid input raises `UsageError` with the equation and the values, the same on all ranks.
"""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from minipar.autograd import guards
from minipar.comm.mesh import mesh_shape
from minipar.errors import UsageError, check_memory
from minipar.nn.gpt import GPTConfig
from minipar.nn.llama import LlamaConfig
from minipar.nn.moe import MixtralConfig
from minipar.nn.transformer import TransformerConfig
from minipar.parallel import token_order, tree, ulysses
from minipar.parallel.guards import is_power_of_two
from minipar.parallel.pipeline import check as checker
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedule_file import load_csv
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.tensor.plan import check_shape
from minipar.train.flags import make_parser
from minipar.train.settings import (
    CHOICES,
    EXPECTED,
    FOR_MODELS,
    INTERVALS,
    NEEDS,
    SIZES,
    ModelConfig,
    TrainConfig,
    flags,
    sizes_of,
    with_values,
)


def parse(argv: Sequence[str], rank: int = 0) -> TrainConfig:
    """Return the command line as a checked TrainConfig.

    UsageError; SystemExit(0) after `--help`, printed by rank 0.
    """
    written = vars(make_parser(prints=rank == 0).parse_args(argv))
    given: dict[str, Any] = {}
    for section, field, _, _ in flags(TrainConfig()):
        if field.name in written:
            given[f"{section}.{field.name}"] = written[field.name]
    config = dataclasses.replace(with_values(TrainConfig(), given), given=frozenset(given))
    check_settings(config)
    return config


# ---- what can be known before the number of ranks and the model of a checkpoint or directory -------------------------


def check_settings(config: TrainConfig) -> None:
    """Check what can be known before the number of ranks and the model of a checkpoint or directory.

    UsageError.
    """
    changed = {flag for _, field, flag, value in flags(config) if value != field.default}
    for section, field, flag, value in flags(config):
        check_value(flag, value)
        if flag in NEEDS and flag in changed:
            check_need(flag, value, changed)
        is_given = f"{section}.{field.name}" in config.given
        if config.model.init_from is not None and flag in SIZES and is_given:
            raise UsageError(f"{flag} and --init-from both give the model's shape; give one of them")
    check_mesh(config)
    check_dropout(config)
    check_start(config)


def check_value(flag: str, value: object) -> None:
    """Raise UsageError for a value outside of the flag's interval, or not one of its choices, or empty."""
    if value is None:
        return
    if flag in INTERVALS:
        for one in value if isinstance(value, tuple) else (value,):
            if not inside(one, INTERVALS[flag]):
                raise UsageError(f"{flag} {one} is outside {INTERVALS[flag]}")
    if flag in CHOICES and value not in CHOICES[flag]:
        raise UsageError(f"{flag} {value}: choose from {', '.join(CHOICES[flag])}")
    if value == "":
        raise UsageError(f"{flag} is empty; expected {EXPECTED[flag]}")


def inside(value: float, interval: str) -> bool:
    """Return whether `value` is in an interval such as "[0, 1)" or "(0, inf)"; nan is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    if value == low:
        return interval[0] == "["
    if value == high:
        return interval[-1] == "]"
    return low < value < high


def check_need(flag: str, value: object, changed: set[str]) -> None:
    """Raise UsageError if the flag that this one needs has its default.

    `changed` are those that have not.
    """
    other = NEEDS[flag].split()[0]
    if other in changed:
        return
    words = [flag]
    if value is not True:
        words += [str(one) for one in (value if isinstance(value, tuple) else (value,))]
    raise UsageError(f"{' '.join(words)} does nothing without {NEEDS[flag]}")


def check_mesh(config: TrainConfig) -> None:
    """Raise UsageError for flags that do nothing, or that contradict each other, on this mesh."""
    mesh = config.mesh
    if mesh.sync_every_microbatch and mesh.zero_stage < 2:
        whole = f"with --zero-stage {mesh.zero_stage} every rank has them whole; it needs stage 2 or 3"
        raise UsageError(f"--sync-every-microbatch keeps gradients sharded between microbatches, but {whole}")
    if mesh.sync_every_microbatch and mesh.pp > 1:
        raise UsageError("--sync-every-microbatch: a pipeline mixes microbatches; its gradients travel once per step")
    if mesh.experts_apart and not mesh.sequence_parallel:
        why = "each rank of tp routes its own tokens, which it has with --sequence-parallel"
        raise UsageError(f"--etp {mesh.etp} with --tp {mesh.tp}: {why}; give that flag, too")
    if config.model.capacity_factor is not None and (mesh.cp > 1 or mesh.experts_apart):
        flag = "--cp" if mesh.cp > 1 else f"--etp {mesh.etp}"
        why = f"the tokens of whole samples, of which {flag} gives a rank a part"
        raise UsageError(f"--capacity-factor shares out {why}")
    if mesh.cp == 1 and {"mesh.context_parallel", "mesh.cp_order"} & config.given:
        raise UsageError("--context-parallel and --cp-order are about context parallelism; give --cp 2 or more")


def check_dropout(config: TrainConfig) -> None:
    """Raise UsageError if attention computes its scores in blocks, which have no dropout."""
    mesh = config.mesh
    dropout = config.optimizer.dropout
    if dropout == 0:
        return
    if mesh.cp > 1 and mesh.context_parallel != "ulysses":
        method = f"--context-parallel {mesh.context_parallel}"
        guards.refuse_dropout(f"--dropout {dropout}", method, "--context-parallel ulysses or --dropout 0")
    if config.run.attention == "blockwise":
        guards.refuse_dropout(f"--dropout {dropout}", "--attention blockwise", "--attention full or --dropout 0")


def check_start(config: TrainConfig) -> None:
    """Raise UsageError if two flags say which weights to start from."""
    run = config.run
    if run.resume == "auto" and run.save is None:
        raise UsageError("--resume auto continues from the newest checkpoint in the DIR of --save; give --save DIR too")
    if run.resume not in (None, "auto") and config.model.init_from is not None:
        raise UsageError("--resume and --init-from both say which weights to start from; give one of them")


# ---- the model -------------------------------------------------------------------------------------------------------


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
    length = config.model.seq_len
    n = shape.n_positions
    if length > n:
        source = config.model.init_from
        raise UsageError(f"seq-len {length} is longer than the {n} positions of {source}; give --seq-len {n} or less")
    values = {}
    for flag, size in sizes_of(shape.model_type).items():
        field = flag.removeprefix("--").replace("-", "_")
        values[f"model.{field}"] = getattr(shape, size)
    return with_values(config, values)


# ---- what the number of ranks decides --------------------------------------------------------------------------------


def resolve(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return `config` with dp filled in for `world_size` ranks; UsageError if mesh, model or batch do not fit."""
    check_model_flags(config)
    steps = config.optimizer.steps
    warmup = config.optimizer.warmup_steps
    if warmup > steps:
        never = f"the learning rate would never reach {config.optimizer.lr}"
        raise UsageError(f"warmup-steps {warmup} is more than steps {steps}: {never}")
    dp = replicas_of(config, world_size)
    try:
        config = with_shape(config, shape_of(config.model))  # fills kv_heads and ffn in
    except ValueError as error:
        raise UsageError(str(error)) from None
    config = with_order(config)
    check_split(config)
    if config.run.reduction == "tree":
        config = with_leaves(config, dp)
    check_batch(config, dp)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, dp=dp))
    return with_values(config, _precision(config))


def check_model_flags(config: TrainConfig) -> None:
    """Raise UsageError for a flag that is for another model."""
    for _, field, flag, value in flags(config):
        if flag in FOR_MODELS and value != field.default:
            models, why = FOR_MODELS[flag]
            if config.model.model not in models:
                raise UsageError(f"{flag} {value} is for --model {' or '.join(models)}: {why}")


def replicas_of(config: TrainConfig, world_size: int) -> int:
    """Return dp.

    UsageError if the mesh does not have `world_size` ranks, or if shards have no replicas.
    """
    mesh = config.mesh
    replicas = mesh.zero_replicas
    dp = mesh_shape(world_size, "mpirun", mesh.dp, mesh.tp, mesh.pp, mesh.cp)["dp"]
    if dp % replicas:
        raise UsageError(f"dp/zero-replicas = {dp}/{replicas} is not a whole number")
    if replicas > 1 and (mesh.ep > 1 or mesh.experts_apart):
        sizes = f"ep {mesh.ep}, etp {mesh.etp}" if mesh.experts_apart else f"ep {mesh.ep}"
        why = "shards of experts have no replicas; give 1 replica, or ep = 1 and no etp"
        raise UsageError(f"zero-replicas {replicas} with {sizes}: {why}")
    return dp


def with_order(config: TrainConfig) -> TrainConfig:
    """Return `config` with an order of tokens over cp that is even for documents, unless one was given.

    UsageError if documents cannot be told apart.
    """
    mesh = config.mesh
    separator = config.data.pack
    if separator is None:
        if mesh.cp_order == "documents":
            raise UsageError("--cp-order documents cuts each document, and without --pack ID a sample is one")
        return config
    vocabulary = config.model.vocab_size
    if separator >= vocabulary:
        raise UsageError(f"--pack {separator} is not a token: ids are 0 to vocab-size - 1 = {vocabulary - 1}")
    if mesh.context_parallel == "ulysses":
        if mesh.cp_order == "documents":
            raise UsageError("--cp-order documents is for a ring or an all-gather; with ulysses any order is even")
        return config
    if mesh.cp == 1 or "mesh.cp_order" in config.given:
        return config
    return with_values(config, {"mesh.cp_order": "documents"})


def check_split(config: TrainConfig) -> None:
    """Raise UsageError if the ranks of cp and tp cannot share the tokens and the layers."""
    mesh = config.mesh
    length = config.model.seq_len
    shape = shape_of(config.model)
    if mesh.cp > 1:
        token_order.check_length(length, mesh.cp, mesh.cp_order)
    check_shape(shape, mesh.tp, length // mesh.cp if mesh.sequence_parallel else None, mesh.etp)
    if mesh.context_parallel == "ulysses":
        kv_heads = max(1, shape.n_kv_head // mesh.tp)
        ulysses.check_heads(config.model.heads // mesh.tp, kv_heads, mesh.cp)


# ---- sums as trees ---------------------------------------------------------------------------------------------------


def with_leaves(config: TrainConfig, dp: int) -> TrainConfig:
    """Return `config` with microbatches of one sample, unless they are given: these are the leaves of a tree.

    UsageError if a layout cannot have the bits of one device (docs/combinations.md says why).
    """
    refuse_other_orders(config)
    is_given = "data.microbatches" in config.given or config.data.microbatches > 1
    if not is_given:
        config = with_values(config, {"data.microbatches": max(1, config.data.global_batch // dp)})
    tp = config.mesh.tp
    for name, count in (("dp", dp), ("tp", tp), ("microbatches", config.data.microbatches)):
        if not is_power_of_two(count):
            why = "neighbours are added in pairs, and then the pairs, so it is a power of two"
            raise UsageError(f"--reduction tree with {name} = {count}: {why}")
    leaves = tree.leaf_count(shape_of(config.model), config.model.seq_len)
    if tp > leaves:
        why = f"a layer has {leaves}, the largest power of two in heads, kv-heads, ffn, vocab-size and seq-len"
        raise UsageError(f"--reduction tree with tp = {tp}: each rank has at least one leaf, but {why}")
    return config


def refuse_other_orders(config: TrainConfig) -> None:
    """Raise UsageError for what `--reduction tree` cannot add in one order in all layouts."""
    mesh = config.mesh
    run = config.run
    reasons = {
        f"--cp {mesh.cp}": (mesh.cp > 1, "a product of a part of a sequence's rows has other bits"),
        "--model mixtral": (config.model.model == "mixtral", "how many rows an expert has depends on the batch"),
        f"--dtype {run.dtype}": (run.dtype not in ("float32", "float64"), "each rank rounds its term to 2 bytes"),
        "--sync-every-microbatch": (mesh.sync_every_microbatch, "it sums over dp before it sums over microbatches"),
        f"--device {run.device}": (run.device != "cpu", "its library computes products of stacks in another order"),
    }
    for flag, (is_used, why) in reasons.items():
        if is_used:
            raise UsageError(f"--reduction tree does not go with {flag}: {why}")


def check_batch(config: TrainConfig, dp: int) -> None:
    """Raise UsageError if the batch cannot be cut into equal microbatches, or is larger than the memory."""
    batch = config.data.global_batch
    length = config.model.seq_len
    m = config.data.microbatches
    if batch % (dp * m):
        raise UsageError(f"global-batch {batch} is not divisible by dp*microbatches = {dp}*{m} = {dp * m}")
    check_memory(Decimal(8 * batch) * length, f"positions: 8 bytes * {batch} samples * {length} tokens")


def _precision(config: TrainConfig) -> dict[str, str]:
    """Return the dtypes of gradients in 2-byte training that were not given.

    UsageError for what it does not have.
    """
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
    """Return the schedule that `--schedule` names, checked, for the mesh and the number of microbatches.

    UsageError.
    """
    name = config.mesh.schedule or "1f1b"
    pp = config.mesh.pp
    microbatches = config.data.microbatches
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
