"""The settings of a training run: frozen dataclasses, whose fields are the command line's flags.

A new flag is a field here, an argument in flags.py and, if it has limits, an entry in a table
below.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minipar.autograd import METHODS
from minipar.parallel import context, token_order

SECTIONS = ("mesh", "model", "data", "optimizer", "run")
DTYPES = ("float32", "float64", "bfloat16", "float16")
SHORT_DTYPES = ("float32", "bfloat16", "float16")
MODELS = ("gpt2", "llama", "mixtral")

# The values that a flag can have, if they are few.
CHOICES = {
    "--context-parallel": context.METHODS,
    "--cp-order": token_order.ALL_ORDERS,
    "--model": MODELS,
    "--order": ("random", "sequential"),
    "--lr-schedule": ("constant", "cosine"),
    "--dtype": DTYPES,
    "--gradients": SHORT_DTYPES,
    "--reduce-dtype": SHORT_DTYPES,
    "--device": ("cpu", "cuda"),
    "--recompute": ("none", "full"),
    "--attention": METHODS,
    "--reduction": ("ring", "ordered", "tree"),
    "--clock": ("wall", "cpu", "model"),
    "--export-dtype": DTYPES,
}

# The interval in which each value of a flag must be.
INTERVALS = {
    "--zero-stage": "[0, 3]",
    "--aux-loss": "[0, inf)",
    "--router-bias": "[0, inf)",
    "--capacity-factor": "(0, inf)",
    "--lr": "(0, inf)",
    "--warmup-steps": "[0, inf)",
    "--betas": "[0, 1)",
    "--eps": "(0, inf)",
    "--weight-decay": "[0, inf)",
    "--dropout": "[0, 1)",
    "--clip-grad": "[0, inf)",
    "--pack": "[0, inf)",
    "--seed": "[0, 1.8e19]",
    "--network": "[0, inf)",
}
_COUNTS = "--dp --tp --cp --ep --etp --pp --virtual-stages --zero-replicas --layers --hidden --heads "
_COUNTS += "--seq-len --vocab-size --kv-heads --ffn --experts --top-k --global-batch "
_COUNTS += "--microbatches --eval-every --steps --save-every"
for _flag in _COUNTS.split():
    INTERVALS[_flag] = "[1, inf)"

# What an empty text should have been.
EXPECTED = {
    "--schedule": "NAME",
    "--init-from": "DIR",
    "--data": "PATH",
    "--eval-data": "PATH",
    "--metrics": "FILE.jsonl",
    "--trace": "FILE.json",
    "--memory": "FILE.json",
    "--record": "DIR",
    "--save": "DIR",
    "--resume": "DIR",
    "--export": "DIR",
}

# The flag without which this one does nothing.
NEEDS = {
    "--schedule": "--pp 2 or more",
    "--virtual-stages": "--pp 2 or more",
    "--sequence-parallel": "--tp 2 or more",
    "--etp": "--tp 2 or more",
    "--zero-replicas": "--zero-stage 1, 2 or 3",
    "--eval-data": "--eval-every K",
    "--clock": "--trace FILE.json",
    "--network": "--clock cpu or model",
    "--save-every": "--save DIR",
    "--export-dtype": "--export DIR",
}

# The models that a flag is for, if it is not for all, and why.
_LLAMA = (("llama", "mixtral"), "each head of GPT-2 has keys and values of its own, and its MLP 4*hidden columns")
_MIXTRAL = (("mixtral",), "a layer of other models has one MLP, no experts")
FOR_MODELS = {
    "--ep": _MIXTRAL,
    "--etp": _MIXTRAL,
    "--kv-heads": _LLAMA,
    "--ffn": _LLAMA,
    "--experts": _MIXTRAL,
    "--top-k": _MIXTRAL,
    "--aux-loss": _MIXTRAL,
    "--router-bias": _MIXTRAL,
    "--capacity-factor": _MIXTRAL,
    "--dropout": (("gpt2",), "Llama and Mixtral have no dropout"),
}

# The flags that give the shape of the model, and the name of each size in TransformerConfig.
SIZES = {
    "--layers": "n_layer",
    "--hidden": "n_embd",
    "--heads": "n_head",
    "--vocab-size": "vocab_size",
    "--model": "model_type",
    "--kv-heads": "n_kv_head",
    "--ffn": "n_inner",
    "--experts": "num_local_experts",
    "--top-k": "num_experts_per_tok",
}


@dataclass(frozen=True)
class MeshConfig:
    """The number of ranks that each kind of parallelism takes, and what the ranks share."""

    dp: int | None = None
    tp: int = 1
    cp: int = 1
    context_parallel: str = "ring"
    cp_order: str = "zigzag"
    ep: int = 1
    etp: int | None = None
    pp: int = 1
    schedule: str | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool = False
    zero_stage: int = 0
    zero_replicas: int = 1
    sync_every_microbatch: bool = False
    memory_limit: int | None = None

    @property
    def experts_apart(self) -> bool:
        """Whether ranks of tp hold different experts, because etp is less than tp."""
        return self.etp is not None and self.etp < self.tp


@dataclass(frozen=True)
class ModelConfig:
    """GPT-2's architecture, Llama's, or Mixtral's."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    seq_len: int = 64
    vocab_size: int = 256
    model: str = "gpt2"
    kv_heads: int | None = None
    ffn: int | None = None
    experts: int | None = None
    top_k: int | None = None
    aux_loss: float = 0.0
    router_bias: float = 0.0
    capacity_factor: float | None = None
    init_from: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """The source of the tokens and their order."""

    path: str | None = None
    order: str = "random"
    pack: int | None = None
    global_batch: int = 32
    microbatches: int = 1
    eval_every: int | None = None
    eval_data: str | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, as torch.optim.AdamW computes it."""

    steps: int = 300
    lr: float = 1e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    dropout: float = 0.0
    clip_grad: float = 0.0


@dataclass(frozen=True)
class RunConfig:
    """Seed, precision, device, and the files that are written."""

    seed: int = 0
    dtype: str = "float32"
    gradients: str | None = None
    reduce_dtype: str | None = None
    skip_nonfinite: bool = False
    device: str = "cpu"
    recompute: str = "none"
    attention: str = "auto"
    reduction: str = "ring"
    metrics: str | None = None
    trace: str | None = None
    clock: str = "wall"
    memory: str | None = None
    record: str | None = None
    network: tuple[float, float] = (0.0, 0.0)
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None
    export: str | None = None
    export_dtype: str | None = None
    verify: bool = False


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
            flag = "--" + field.name.replace("_", "-")
            if flag == "--path":
                flag = "--data"
            yield section, field, flag, getattr(values, field.name)


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return `config` with the given fields replaced; the keys are "section.field", and a list becomes a tuple."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        by_section.setdefault(section, {})[field] = tuple(value) if isinstance(value, list) else value
    sections = {}
    for section, fields in by_section.items():
        sections[section] = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **sections)


def sizes_of(model_type: str) -> dict[str, str]:
    """Return the part of SIZES that a model of this type has."""
    sizes = {}
    for flag, size in SIZES.items():
        if flag not in FOR_MODELS or model_type in FOR_MODELS[flag][0]:
            sizes[flag] = size
    return sizes
