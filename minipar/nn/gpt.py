"""GPT-2 (Radford et al. 2019), exactly: function, names and shapes of Hugging Face's GPT2LMHeadModel.

Pre-LayerNorm blocks, learned positions, tanh GELU, scores scaled by 1/sqrt(head size), output head
tied to the token embedding. Shapes: B samples, T tokens per sample, h hidden, V vocabulary.
transformer.py says what strategies change.
"""

import math
from dataclasses import dataclass
from typing import Any

from minipar.autograd import Tensor, gelu
from minipar.backend import Array
from minipar.nn.layers import Dropout, Embedding, Init, LayerNorm, Linear
from minipar.nn.module import Module
from minipar.nn.parameter import Parameter
from minipar.nn.transformer import LanguageModel, SelfAttention, TransformerConfig


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT, under the names of Hugging Face's config.json. Defaults are GPT-2 small."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    model_type = "gpt2"
    tie_word_embeddings = True

    @property
    def n_kv_head(self) -> int:
        return self.n_head

    @property
    def n_inner(self) -> int:
        return 4 * self.n_embd

    @property
    def layer_matrices(self) -> int:
        # c_attn has 3 h^2 elements, its c_proj h^2, c_fc 4 h^2 and its c_proj 4 h^2.
        return 12 * self.n_embd**2

    @property
    def parameters(self) -> int:
        h = self.n_embd
        embeddings = (self.vocab_size + self.n_positions) * h
        layer = self.layer_matrices + 13 * h
        return embeddings + self.n_layer * layer + 2 * h

    def build(self, **options: Any) -> "GPT":
        return GPT(self, **options)


def norm_of(model: "GPT") -> LayerNorm:
    """Make a LayerNorm over the hidden dim."""
    config = model.config
    # All values are deferred until `assemble` computes them.
    return LayerNorm(config.n_embd, config.layer_norm_epsilon, model.dtype, deferred=True)


class Attention(SelfAttention):
    """Multi-head causal self-attention: (B, T, h) -> (B, T, h)."""

    def __init__(self, model: "GPT", name: str) -> None:
        h = model.config.n_embd
        self.heads = model.config.n_head
        self.kv_heads = model.config.n_head
        self.attention = model.attention
        self.c_attn = Linear(h, 3 * h, name=f"{name}.c_attn", **model.init)
        self.c_proj = Linear(h, h, name=f"{name}.c_proj", **model.residual_init)
        self.attn_dropout = Dropout(f"{name}.attn_dropout", model.drop_probability)
        self.resid_dropout = Dropout(f"{name}.resid_dropout", model.drop_probability)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x)  # (B, T, 3h)
        batch, length, _ = qkv.shape
        # True where a probability stays; None without dropout. It is applied inside attention.
        keep = self.attn_dropout.mask((batch, self.heads, length, length))
        y = self.attention(qkv, self.heads, self.kv_heads, keep, self.attn_dropout.p)  # (B, T, h)
        return self.resid_dropout(self.c_proj(y))  # (B, T, h)


class MLP(Module):
    """Two linear layers with a GELU between them: (B, T, h) -> (B, T, 4h) -> (B, T, h)."""

    def __init__(self, model: "GPT", name: str) -> None:
        h = model.config.n_embd
        self.c_fc = Linear(h, 4 * h, name=f"{name}.c_fc", **model.init)
        self.c_proj = Linear(4 * h, h, name=f"{name}.c_proj", **model.residual_init)
        self.dropout = Dropout(f"{name}.dropout", model.drop_probability)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))  # (B, T, 4h) inside


class Block(Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: "GPT", name: str) -> None:
        self.ln_1 = norm_of(model)
        self.attn = Attention(model, f"{name}.attn")
        self.ln_2 = norm_of(model)
        self.mlp = MLP(model, f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """The language model: tokens (B, T) -> logits (B, T, V).

    `dropout` is the probability everywhere GPT-2 has it: after the embedding, on the attention
    probabilities, after attention and after the MLP. It acts only inside `layers.dropping(keys)`.
    The other arguments are LanguageModel's. Matrices start from N(0, initializer_range^2), biases
    from 0 and gains from 1 (GPT-2 paper, section 2.3). Each block adds two outputs to x; the std of
    their projections, `c_proj`, is divided by sqrt(2 n_layer). ValueError for a sequence longer
    than `n_positions`.
    """

    config_type = GPTConfig
    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        seed: int = 0,
        dtype: str = "float32",
        recompute: bool = False,
        deferred: bool = False,
        attention: str = "auto",
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, seed, dtype, recompute, deferred, attention)
        small = config.initializer_range / math.sqrt(2 * config.n_layer)
        self.residual_init = Init(seed=seed, dtype=self.dtype, std=small, deferred=True)
        self.drop_probability = dropout
        self.wte = Embedding(config.vocab_size, config.n_embd, name="wte", **self.init)
        self.wpe = Embedding(config.n_positions, config.n_embd, name="wpe", **self.init)
        self.drop = Dropout("drop", dropout)
        blocks = {f"h.{i}": Block(self, f"h.{i}") for i in range(config.n_layer)}
        self.h = list(blocks.values())
        self.ln_f = norm_of(self)
        self.assemble([self.wte.weight, self.wpe.weight], blocks, self.ln_f)

    @property
    def token_embedding(self) -> Parameter:
        return self.wte.weight

    def embed(self, tokens: Array) -> Tensor:
        """Add the embeddings of tokens and positions: integers (B, T) -> (B, T, h)."""
        length = tokens.shape[1]
        if length > self.config.n_positions:
            has = f"the model has {self.config.n_positions} positions"
            raise ValueError(f"sequence of {length} tokens, but {has}")
        return self.drop(self.wte(tokens) + self.wpe(self.positions(length)))
