"""GPT-2 (Radford et al. 2019), exactly: function, names and shapes of Hugging Face's GPT2LMHeadModel.

Pre-LayerNorm blocks, learned positions, tanh GELU, scores scaled by 1/sqrt(head size), output head
tied to the token embedding. Shapes: B samples, T tokens per sample, h hidden, V vocabulary.

The model does not know that it is parallel; strategies change it from outside. Tensor parallelism
replaces layers by parallel ones, divides each attention's heads, and replaces the two functions
that see the whole vocabulary, `project` and `criterion`. Context parallelism replaces each
`attention`, and `positions`. Pipeline parallelism runs a range of `segments` on each rank. Data
parallelism adds gradient hooks, ZeRO moves all parameters into flat storage, and its stage 3 wraps
the `run` of segments.
"""

# For mypy: one config's field is another's property.
# mypy: disable-error-code="override"

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minipar.autograd.attention import causal_attention
from minipar.autograd.fused import cross_entropy_sum, gelu, linear
from minipar.autograd.recompute import checkpoint
from minipar.autograd.tensor import Tensor
from minipar.backend import Array
from minipar.nn.layers import Dropout, Embedding, LayerNorm, Linear
from minipar.nn.module import Module, Segment, array_of
from minipar.nn.parameter import Parameter


class TransformerConfig:
    """The shape of a model, which other code reads under these names. The base of the models' configs.

    Each config is a frozen dataclass, whose fields have the names of its config.json.
    """

    model_type: ClassVar[str]  # as in config.json
    vocab_size: int
    n_positions: int  # the length of the longest sequence
    n_embd: int  # the hidden size h
    n_layer: int  # the number of blocks
    n_head: int  # heads of queries
    n_kv_head: int  # heads of keys, and of values
    n_inner: int  # the MLP's inner size
    tie_word_embeddings: bool  # whether the head is the token embedding
    layer_matrices: int  # the elements of a layer's matrices that a token is multiplied with
    build: Callable[..., "LanguageModel"]  # makes the model; takes the other arguments of its class

    def segment_flops(self, length: int) -> list[int]:
        """Return the operations per token of each segment's matrix products in forward, in sequences of `length`.

        Backward takes twice as many. Source: Narayanan et al. 2021.
        """
        block = 2 * self.layer_matrices + 4 * length * self.n_embd
        return [0, *[block] * self.n_layer, 2 * self.n_embd * self.vocab_size]


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

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"hidden {self.n_embd} is not divisible by heads {self.n_head}")

    @property
    def n_kv_head(self) -> int:
        return self.n_head

    @property
    def n_inner(self) -> int:
        return 4 * self.n_embd

    @property
    def residual_std(self) -> float:
        """Return the std of the projections whose results are added to x: 2 n_layer are."""
        return self.initializer_range / math.sqrt(2 * self.n_layer)

    @property
    def layer_matrices(self) -> int:
        # c_attn has 3 h^2 elements, its c_proj h^2, c_fc 4 h^2 and its c_proj 4 h^2.
        return 12 * self.n_embd**2

    def build(self, **options: Any) -> "GPT":
        return GPT(self, **options)


class SelfAttention(Module):
    """The base of the models' attention layers: what strategies change.

    `heads` of q, and `kv_heads` of k and of v, are computed here, by `attention`.
    """

    heads: int
    kv_heads: int
    attention: Callable[..., Tensor] = staticmethod(causal_attention)


class Attention(SelfAttention):
    """Multi-head causal self-attention: (B, T, h) -> (B, T, h)."""

    def __init__(
        self, config: GPTConfig, name: str, seed: int | None, dtype: str, dropout: float
    ) -> None:
        h = config.n_embd
        self.heads = config.n_head
        self.kv_heads = config.n_head
        self.c_attn = Linear(
            h, 3 * h, name=f"{name}.c_attn", seed=seed, dtype=dtype, std=config.initializer_range
        )
        self.c_proj = Linear(h, h, name=f"{name}.c_proj", seed=seed, dtype=dtype, std=config.residual_std)
        self.attn_dropout = Dropout(f"{name}.attn_dropout", dropout)
        self.resid_dropout = Dropout(f"{name}.resid_dropout", dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x)  # (B, T, 3h)
        batch, length, _ = qkv.shape
        # True where a probability stays; None without dropout. It is applied inside attention.
        keep = self.attn_dropout.mask((batch, self.heads, length, length))
        y = self.attention(qkv, self.heads, self.kv_heads, keep, self.attn_dropout.p)  # (B, T, h)
        return self.resid_dropout(self.c_proj(y))  # (B, T, h)


class MLP(Module):
    """Two linear layers with a GELU between them: (B, T, h) -> (B, T, 4h) -> (B, T, h)."""

    def __init__(
        self, config: GPTConfig, name: str, seed: int | None, dtype: str, dropout: float
    ) -> None:
        h = config.n_embd
        self.c_fc = Linear(
            h, 4 * h, name=f"{name}.c_fc", seed=seed, dtype=dtype, std=config.initializer_range
        )
        self.c_proj = Linear(
            4 * h, h, name=f"{name}.c_proj", seed=seed, dtype=dtype, std=config.residual_std
        )
        self.dropout = Dropout(f"{name}.dropout", dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))  # (B, T, 4h) inside


class Block(Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: GPTConfig, name: str, seed: int | None, dtype: str, dropout: float
    ) -> None:
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype)
        self.attn = Attention(config, f"{name}.attn", seed, dtype, dropout)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype)
        self.mlp = MLP(config, f"{name}.mlp", seed, dtype, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(Module):
    """A decoder-only Transformer: tokens (B, T) -> logits (B, T, V). The base class of GPT and Llama.

    A subclass makes the layers and the `segments`, of which the last ends with `project`.
    """

    segments: list[Segment]
    token_embedding: Parameter  # the matrix (V, h) in which tokens are looked up
    head_weight: Tensor | None = None  # the head's leaf of the token embedding, if the head is tied

    def __init__(self, config: TransformerConfig, dtype: str, recompute: bool) -> None:
        self.config = config
        self.dtype = dtype
        self.recompute = recompute
        # What strategies replace. A rank that has all tokens of a sequence has the positions 0 to T - 1.
        self.positions: Callable[[int], Array] = np.arange
        self.project: Callable[[Tensor, Tensor], Tensor] = partial(linear, transposed=True)
        self.criterion: Callable[[Tensor, Array], Tensor] = cross_entropy_sum

    def run_block(self, block: Module, x: Tensor) -> Tensor:
        """Run one block, (B, T, h) -> (B, T, h); with `recompute`, backward runs it again."""
        if self.recompute:
            return checkpoint(block, x, parameters=block.parameters())
        return block(x)

    def forward(self, tokens: Array) -> Tensor:
        x: Array | Tensor = array_of(tokens)
        for segment in self.segments:
            x = segment.run(x)
        return x

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return the cross-entropy in nats of tokens x (B, T), summed over the targets y.

        Targets of -100 do not count.
        """
        return self.criterion(self(x), array_of(y))


class GPT(LanguageModel):
    """The language model: tokens (B, T) -> logits (B, T, V).

    `seed` and the parameters' names determine the initial weights (see layers.py): matrices start
    from N(0, initializer_range^2), biases from 0 and gains from 1 (GPT-2 paper, section 2.3), and
    `residual_std` is that of `c_proj`. `recompute=True` keeps only each block's input and runs the
    block again in backward. `dropout` is the probability everywhere GPT-2 has it: after the
    embedding, on the attention probabilities, after attention and after the MLP. It acts only
    inside `layers.dropping(keys)`.
    """

    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        seed: int | None = 0,
        dtype: str = "float32",
        recompute: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(config, dtype, recompute)
        h = config.n_embd
        std = config.initializer_range
        self.wte = Embedding(config.vocab_size, h, name="wte", seed=seed, dtype=dtype, std=std)
        self.wpe = Embedding(config.n_positions, h, name="wpe", seed=seed, dtype=dtype, std=std)
        self.drop = Dropout("drop", dropout)
        self.h = [Block(config, f"h.{i}", seed, dtype, dropout) for i in range(config.n_layer)]
        self.ln_f = LayerNorm(h, config.layer_norm_epsilon, dtype)
        # In a pipeline the token embedding is on two ranks; so the head has a leaf of its own, whose
        # gradient is added before the gradients are summed over ranks, or else at the step.
        self.head_weight: Tensor = self.wte.weight.tie()
        embeddings = [self.wte.weight, self.wpe.weight]
        self.segments = [Segment("embedding", self.embed, embeddings, reads_in_backward=False)]
        for i, block in enumerate(self.h):
            run = partial(self.run_block, block)
            self.segments.append(Segment(f"h.{i}", run, block.parameters()))
        read_by_head = [self.wte.weight, *self.ln_f.parameters()]
        self.segments.append(Segment("head", self.head, read_by_head, is_last=True))

    @property
    def token_embedding(self) -> Parameter:
        return self.wte.weight

    def embed(self, tokens: Array) -> Tensor:
        """Add the embeddings of tokens and positions: integers (B, T) -> (B, T, h)."""
        return self.drop(self.wte(tokens) + self.wpe(self.positions(tokens.shape[1])))

    def head(self, x: Tensor) -> Tensor:
        """Multiply the normalized rows with the token embedding, (B, T, h) -> (B, T, V)."""
        self.head_weight.data = self.wte.weight.data  # ZeRO may have moved it since
        return self.project(self.ln_f(x), self.head_weight)
