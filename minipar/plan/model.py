"""A model's shape: its parameters and floating-point operations, counted exactly.

A multiply and an add are two operations, and only matrix products are counted (Narayanan et al.
2021, arXiv 2104.04473, appendix). Attention is counted as if every token attended to all tokens, as
in the published figures. Backward takes twice the operations of forward. *Model* FLOPs are those
that training needs. *Hardware* FLOPs include recomputation (Chowdhery et al. 2022, arXiv
2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198, appendix A).
"""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minipar.errors import UsageError
from minipar.train.pretrained import read_json

RECOMPUTE = ("none", "selective", "full")
MOST_LAYERS = 4096  # a search goes through every layer of a stage
MOST = 10**9  # no other size may be larger


def check_size(label: str, field: str, size: Any, optional: bool) -> None:
    """Raise UsageError unless `size` is a whole number that a field of ModelShape can have, or None
    if optional.
    """
    if size is None and optional:
        return
    least = int(field != "positions")
    most = MOST_LAYERS if field == "layers" else MOST
    if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= most:
        raise UsageError(
            f"{label} = {repr(size)[:40]}, expected a whole number from {least} to {most}"
        )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only Transformer, of GPT-2's kind by default.

    h = hidden, a = heads, V = vocab_size, l = layers. UsageError for sizes that cannot be.

    kv_heads     heads of keys and values (grouped attention); None: as many as heads
    ffn          inner size of the MLP; None: 4h
    gated        whether the MLP is gated: three matrices (SwiGLU) instead of two
    positions    learned positions; 0 for rotary positions, which have no parameters
    tied         whether the output head is the token embedding
    biases       whether linear layers have biases;  norm_biases: whether norms do (LayerNorm does,
                 RMSNorm does not)
    experts      MLPs in a layer, of which a router sends each token to top_k; None: one MLP and no
                 router
    """

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    positions: int = 0
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    biases: bool = True
    norm_biases: bool = True
    experts: int | None = None
    top_k: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.type is not bool:
                check_size(field.name, field.name, size, optional=field.default is None)
        if self.top_k > (self.experts or 1):
            raise UsageError(f"top-k {self.top_k} is more than experts {self.experts or 1}")
        if self.experts and self.biases:
            raise UsageError("a layer of experts has no biases")
        if self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise UsageError(f"heads {self.heads} are not divisible by kv-heads {self.groups}")

    @property
    def groups(self) -> int:
        """Return the number of heads of keys and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def qkv(self) -> int:
        """Return the columns of attention's first product: queries, keys and values."""
        return self.hidden + 2 * self.groups * (self.hidden // self.heads)

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Return the heads of queries and of keys on a tp rank: a copy of one, if these are fewer
        than the ranks.
        """
        return self.heads // tp, max(1, self.groups // tp)

    def with_copies(self, tp: int) -> "ModelShape":
        """Return the model of whose layers a tp rank holds 1/tp: with a head of keys for each rank, at least."""
        return self if self.groups >= min(tp, self.heads) else replace(self, kv_heads=tp)

    def tp_divides(self, tp: int) -> bool:
        """Return whether tp divides the heads, and divides those of keys and values or is a
        multiple of them.
        """
        return self.heads % tp == 0 and (self.groups % tp == 0 or tp % self.groups == 0)

    @property
    def active_inner(self) -> int:
        """Return the inner size of all MLPs of a layer that a token passes: one, or top_k
        experts.
        """
        return self.top_k * self.inner

    @property
    def router(self) -> int:
        """Return the elements of a layer's router: h for each expert."""
        return self.hidden * (self.experts or 0)

    @property
    def expert_parameters(self) -> int:
        """Return the elements of one expert: of the two or three matrices of an MLP."""
        return self.hidden * (3 if self.gated else 2) * self.inner

    @property
    def layer_matrices(self) -> int:
        """Return the elements of those matrices of a layer with which a token is multiplied. GPT-2:
        12 h^2.
        """
        return (
            self.hidden * (self.qkv + self.hidden)
            + self.router
            + self.top_k * self.expert_parameters
        )

    # ---- parameters ------------------------------------------------------------------------------

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of a layer: attention, MLP, two norms. GPT-2: 12 h^2 + 13 h."""
        biases = self.qkv + self.hidden + (2 if self.gated else 1) * self.inner + self.hidden
        return (
            self.layer_matrices
            + (biases if self.biases else 0)
            + 2 * self.norm_parameters
            + self.idle_parameters
        )

    @property
    def idle_parameters(self) -> int:
        """Return the parameters of a layer that one token does not use: those of experts that it is
        not sent to.
        """
        return 0 if self.experts is None else (self.experts - self.top_k) * self.expert_parameters

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm_biases else 1)

    @property
    def parameters(self) -> int:
        """Return all parameters: embeddings, layers, the last norm, and the output matrix unless it
        is tied.
        """
        matrices = self.vocab_size * (1 if self.tied else 2) + self.positions
        return matrices * self.hidden + self.layers * self.layer_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token uses."""
        return self.parameters - self.layers * self.idle_parameters

    # ---- operations of one sequence of s = `length` tokens ---------------------------------------

    def attention_core_flops(self, length: int) -> int:
        """Return the forward operations of QK^T and of the product with V in one layer: 4 s^2 h."""
        return 4 * length * length * self.hidden

    def layer_flops(self, length: int) -> int:
        """Return the forward operations of one layer. GPT-2: 24 s h^2 + 4 s^2 h."""
        return 2 * length * self.layer_matrices + self.attention_core_flops(length)

    @property
    def column_shares(self) -> tuple[float, float]:
        """Return the two column-parallel layers' shares of a layer's matrices: q, k, v and the
        MLP's first.
        """
        first = self.qkv
        second = (2 if self.gated else 1) * self.active_inner
        whole = first + second + self.hidden + self.active_inner
        return first / whole, second / whole

    def head_flops(self, length: int) -> int:
        """Return the forward operations of the output head: 2 s h V."""
        return 2 * length * self.hidden * self.vocab_size

    def model_flops(self, length: int) -> int:
        """Return the operations of a sequence, forward and backward. GPT-2: 72 s l h^2 (1 + s/(6h)
        + V/(12 l h)).
        """
        return 3 * (self.layers * self.layer_flops(length) + self.head_flops(length))

    def hardware_flops(self, length: int, recompute: str = "none") -> int:
        """Return the model FLOPs of a sequence and those of its recomputation.

        "selective" recomputes the attention core, "full" each layer's forward: GPT-2 then takes
        96 s l h^2 (1 + s/(6h) + V/(16 l h)).

        NB: Korthikanti et al. 2022, appendix A, charge a recomputed attention core three times its
        forward, s/(3h) instead of s/(6h). It is counted once here, since it is computed once.
        """
        again = {
            "none": 0,
            "selective": self.attention_core_flops(length),
            "full": self.layer_flops(length),
        }
        if recompute not in again:
            raise UsageError(f"recompute {recompute}: expected one of {', '.join(RECOMPUTE)}")
        return self.model_flops(length) + self.layers * again[recompute]

    def counted_flops(self, length: int, recompute: str = "none") -> dict[str, int]:
        """Return the operations of a sequence as reports of utilization count them, by the name of
        the convention.

        6N                two operations per parameter and token forward, four backward; embeddings
                          count, too
        6N + attention    and attention's core for all pairs of tokens: 12 l h s for each token
        causal attention  and attention's core for half of the pairs, those that are visible
        with recompute    6N + attention, and what is computed again: the core, or a third of all
                          (hardware FLOPs)
        """
        parameters = 6 * length * self.active_parameters
        core = self.layers * self.attention_core_flops(length)
        every_pair = parameters + 3 * core
        again = {"none": 0, "selective": core, "full": every_pair // 3}
        return {
            "6N": parameters,
            "6N + attention": every_pair,
            "causal attention": parameters + 3 * core // 2,
            "with recompute": every_pair + again[recompute],
        }


def utilization(flops: int, seconds: float, gpus: int, peak: float) -> float:
    """Return flops / (seconds * gpus * peak): MFU of model FLOPs, HFU of hardware FLOPs (`peak`:
    FLOP/s of a GPU).
    """
    return flops / (seconds * gpus * peak)


LLAMA = {
    "gated": True,
    "biases": False,
    "norm_biases": False,
}  # the fields in which it differs from GPT-2


def _gpt(
    layers: int, hidden: int, heads: int, vocab_size: int = 51200, positions: int = 2048
) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, vocab_size=vocab_size, positions=positions
    )


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab_size: int
) -> ModelShape:
    return ModelShape(
        layers, hidden, heads, vocab_size, kv_heads=kv_heads, ffn=ffn, tied=False, **LLAMA
    )


# GPT-2: Radford et al. 2019. gpt3-175b: Brown et al. 2020 (vocabulary as Megatron pads it).
# megatron-*: Narayanan et al. 2021, table 1. llama-*: Touvron et al. 2023 (arXiv 2302.13971,
# 2307.09288); Llama Team 2024 (arXiv 2407.21783). mixtral-*: Jiang et al. 2024 (arXiv 2401.04088),
# and the config.json of Mixtral-8x22B-v0.1.
MODELS = {
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 50257, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt3-175b": _gpt(96, 12288, 96),
    "megatron-1.7b": _gpt(24, 2304, 24),
    "megatron-3.6b": _gpt(30, 3072, 32),
    "megatron-7.5b": _gpt(36, 4096, 32),
    "megatron-18b": _gpt(40, 6144, 48),
    "megatron-22b": _gpt(48, 6144, 64),
    "megatron-39b": _gpt(48, 8192, 64),
    "megatron-76b": _gpt(60, 10240, 80),
    "megatron-145b": _gpt(80, 12288, 96),
    "megatron-310b": _gpt(96, 16384, 128),
    "megatron-530b": _gpt(105, 20480, 128),
    "megatron-1t": _gpt(128, 25600, 160),
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 8, 14336, 32000), experts=8, top_k=2),
    "mixtral-8x22b": replace(_llama(56, 6144, 48, 8, 16384, 32000), experts=8, top_k=2),
}
# A field of ModelShape and its key in a config.json of Hugging Face.
GPT2_KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab_size": "vocab_size", "positions": "n_positions",
    "ffn": "n_inner",
}  # fmt: skip
LLAMA_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "ffn": "intermediate_size", "vocab_size": "vocab_size", "kv_heads": "num_key_value_heads",
}  # fmt: skip
MIXTRAL_KEYS = LLAMA_KEYS | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
KEYS = {"gpt2": GPT2_KEYS, "llama": LLAMA_KEYS, "mixtral": MIXTRAL_KEYS}
OPTIONAL_KEYS = ("n_inner", "num_key_value_heads")


def find_model(name: str) -> ModelShape:
    """Return a model by its name, or that of a directory with a config.json of Hugging Face.

    UsageError for an unknown name and for a file that describes no GPT-2, Llama or Mixtral.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path, config = read_config(name)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise UsageError(f"{path}: model_type {str(kind)[:40]!r}: expected gpt2, llama or mixtral")
    keys = KEYS[kind]
    for field, key in keys.items():
        check_size(f"{path}: {key}", field, config.get(key), optional=key in OPTIONAL_KEYS)
    sizes: dict[str, Any] = {field: config.get(key) for field, key in keys.items()}
    if kind != "gpt2":
        sizes |= {"tied": bool(config.get("tie_word_embeddings", False)), **LLAMA}
    try:
        return ModelShape(**sizes)
    except UsageError as error:
        raise UsageError(f"{path} does not describe a model: {error}") from None


def read_config(directory: str) -> tuple[Path, dict[str, Any]]:
    """Return a directory's config.json and its path. UsageError."""
    path = Path(directory) / "config.json"
    if os.path.exists(path):  # False, too, for a name that is too long
        return path, read_json(path)
    raise UsageError(
        f"--model {directory}: neither a directory with a config.json nor one of {', '.join(MODELS)}"
    )
