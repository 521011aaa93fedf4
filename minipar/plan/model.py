"""What a model is, to a planner: its parameters and its floating-point operations, counted exactly.

A multiply and an add are two operations, and only matrix products are counted (Narayanan et al. 2021, arXiv 2104.04473,
appendix). Attention is counted as if every token saw every other, as in the published figures. Backward takes twice
forward. *Model* FLOPs are what training needs; *hardware* FLOPs add what recomputation does again (Chowdhery et al.
2022, arXiv 2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198, appendix A).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from minipar.errors import UsageError

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer. h hidden, a heads, V vocabulary; GPT-2's kind unless told otherwise.

    kv_heads     heads of keys and values (grouped attention); as many as heads if None
    ffn          the MLP's inner size; 4h if None
    gated        a gated MLP: three matrices (SwiGLU), not two
    positions    learned positions; 0 for rotary ones, which have no parameters
    tied         the output head is the token embedding
    biases       of all linear layers;  norm_biases: of the norms (LayerNorm has them, RMSNorm has not)
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}, expected at least 1")
        if self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise UsageError(f"heads {self.heads} are not divisible by kv-heads {self.groups}")

    @property
    def groups(self) -> int:
        """Heads of keys and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner(self) -> int:
        """The MLP's inner size."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def qkv(self) -> int:
        """Columns of the attention's first product: queries, keys and values."""
        return self.hidden + 2 * self.groups * (self.hidden // self.heads)

    # ---- parameters --------------------------------------------------------------------------------------------------

    @property
    def layer_parameters(self) -> int:
        """One layer: attention, MLP, two norms. GPT-2: 12 h^2 + 13 h."""
        h, f = self.hidden, self.inner
        matrices = h * self.qkv + h * h + (3 if self.gated else 2) * h * f
        biases = self.qkv + h + (2 if self.gated else 1) * f + h
        return matrices + biases * self.biases + 2 * self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm_biases else 1)

    @property
    def embedding_parameters(self) -> int:
        """Tokens and positions."""
        return (self.vocab_size + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The last norm, and an output matrix unless that is the token embedding."""
        return self.norm_parameters + (0 if self.tied else self.vocab_size * self.hidden)

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters

    # ---- operations, of one sequence ---------------------------------------------------------------------------------

    def attention_core_flops(self, length: int) -> int:
        """Forward of QK^T and of the product with V, one layer: 4 s^2 h."""
        return 4 * length * length * self.hidden

    def layer_flops(self, length: int) -> int:
        """Forward of one layer. GPT-2: 24 s h^2 + 4 s^2 h."""
        h = self.hidden
        matrices = h * self.qkv + h * h + (3 if self.gated else 2) * h * self.inner
        return 2 * length * matrices + self.attention_core_flops(length)

    @property
    def column_shares(self) -> tuple[float, float]:
        """Of a layer's matrices, the two that tensor parallelism splits by columns: q, k, v and the MLP's first."""
        first, second = self.qkv, (2 if self.gated else 1) * self.inner
        whole = first + second + self.hidden + self.inner
        return first / whole, second / whole

    def head_flops(self, length: int) -> int:
        """Forward of the output head: 2 s h V."""
        return 2 * length * self.hidden * self.vocab_size

    def model_flops(self, length: int) -> int:
        """Forward and backward of a sequence. GPT-2: 72 s l h^2 (1 + s/(6h) + V/(12 l h))."""
        return 3 * (self.layers * self.layer_flops(length) + self.head_flops(length))

    def hardware_flops(self, length: int, recompute: str = "none") -> int:
        """With what is computed again: nothing, the attention core ("selective"), or each layer's forward ("full": then
        GPT-2's is 96 s l h^2 (1 + s/(6h) + V/(16 l h))).

        NB: Korthikanti et al. 2022, appendix A, charge a recomputed attention core three times its forward, s/(3h) in
        the place of s/(6h); here it is what is done: once.
        """
        again = {"none": 0, "selective": self.attention_core_flops(length), "full": self.layer_flops(length)}
        if recompute not in again:
            raise UsageError(f"recompute {recompute}: expected one of {', '.join(RECOMPUTE)}")
        return self.model_flops(length) + self.layers * again[recompute]


def utilization(flops: int, seconds: float, gpus: int, peak: float) -> float:
    """Of the cluster's peak (FLOP/s of one GPU), how much these operations are: MFU of model FLOPs, HFU of hardware
    FLOPs.
    """
    return flops / (seconds * gpus * peak)


def _gpt(layers: int, hidden: int, heads: int, vocab_size: int = 51200, positions: int = 2048) -> ModelShape:
    return ModelShape(layers, hidden, heads, vocab_size, positions)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab_size: int) -> ModelShape:
    return ModelShape(
        layers, hidden, heads, vocab_size, 0, kv_heads, ffn, gated=True, tied=False, biases=False, norm_biases=False
    )


# GPT-2: Radford et al. 2019. gpt3-175b: Brown et al. 2020 (vocabulary as Megatron pads it). megatron-*: Narayanan et
# al. 2021, table 1. llama-*: Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); Llama Team 2024 (arXiv 2407.21783).
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
}


def find_model(name: str) -> ModelShape:
    """A model by its name, or by a directory with a config.json of Hugging Face (GPT-2 or Llama). UsageError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json"
    if not path.exists():
        raise UsageError(f"--model {name}: neither a directory with a config.json nor one of {', '.join(MODELS)}")
    try:
        found = json.loads(path.read_text())
        if found["model_type"] == "gpt2":
            own = [found[key] for key in ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")]
            return replace(_gpt(*own), ffn=found.get("n_inner"))
        if found["model_type"] == "llama":
            heads = found["num_attention_heads"]
            kv = found.get("num_key_value_heads", heads)
            sizes = found["intermediate_size"], found["vocab_size"]
            shape = _llama(found["num_hidden_layers"], found["hidden_size"], heads, kv, *sizes)
            return replace(shape, tied=bool(found.get("tie_word_embeddings", False)))
        raise UsageError(f"{path}: model_type {found['model_type']!r}: expected gpt2 or llama")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not describe a model: {type(error).__name__} {error}") from None
